"""Tries Cross Memory Attach, the kernel's copy from one process's memory to another's.

Whether it is allowed depends on Yama, capabilities, uids, seccomp filters and container settings;
trying it between two siblings, which is what two ranks are, settles the question.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from functools import partial

from torch_nixl.cli.doctor.children import Json, first_failure, run_together
from torch_nixl.cli.doctor.report import CmaTrial
from torch_nixl.engine.path import copy_from

_PATTERN = b"torch_nixl doctor: cross memory attach"
_PR_GET_DUMPABLE = 3
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


def try_cma(timeout: float) -> CmaTrial:
    """Let one child read another one's memory.

    Args:
        timeout: Seconds for everything.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.settimeout(timeout)
        outcomes = run_together([partial(_read, ours), partial(_be_read, theirs)], timeout)
    failure = first_failure(outcomes)
    if failure is not None:
        return CmaTrial(works=False, error=failure)
    return CmaTrial.model_validate(outcomes[0].value)


def _be_read(reader: socket.socket) -> Json:
    memory = ctypes.create_string_buffer(_PATTERN, len(_PATTERN))
    libc = ctypes.CDLL(None)
    dumpable = libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)
    reader.sendall(f"{os.getpid()} {ctypes.addressof(memory)} {dumpable}".encode())
    reader.recv(1)
    # Yama's level 1 lets a process read its descendants only, unless the target says otherwise.
    # UCX says so for its processes; without Yama the call fails and nothing is lost.
    libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    reader.sendall(b"!")
    reader.recv(1)
    return None


def _read(target: socket.socket) -> Json:
    pid, address, dumpable = map(int, target.recv(64).split())
    own = ctypes.create_string_buffer(_PATTERN, len(_PATTERN))
    own_error = _attempt(os.getpid(), ctypes.addressof(own))
    first = _attempt(pid, address)
    target.sendall(b"?")
    target.recv(1)
    second = first and _attempt(pid, address)
    target.sendall(b".")
    trial = CmaTrial(
        works=second is None,
        needs_consent=second is None and first is not None,
        error=second,
        own_error=own_error,
        dumpable=dumpable == 1,
    )
    return trial.model_dump(mode="json")


def _attempt(pid: int, address: int) -> str | None:
    """Return None if the bytes came over, else what went wrong."""
    try:
        copied = copy_from(pid, address, len(_PATTERN))
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error.errno))
    if copied != _PATTERN:
        return f"{len(copied)} of {len(_PATTERN)} bytes arrived, or wrong ones"
    return None
