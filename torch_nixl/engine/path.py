"""Which way bytes take between two processes, as far as it can be known.

NIXL does not tell, and UCX only logs it. What decides is whether the kernel lets one process copy
from the other (Cross Memory Attach) and whether the user's ``UCX_TLS`` allows that; both can be
looked at.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable
from typing import Final

from torch_nixl.engine import performance

CMA: Final = "cma"
TCP: Final = "tcp"
NETWORK: Final = "network"

_WITH_CMA = frozenset({"all", "shm", "sm", "mm", "cma"})


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@functools.cache
def _process_vm_readv() -> Callable[..., int] | None:
    """The C library's function; None where it has none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if function is not None:
        function.restype = ctypes.c_ssize_t
    return function


def copy_from(pid: int, address: int, nbytes: int) -> bytes:
    """Copy bytes out of another process's memory, as Cross Memory Attach does.

    Raises:
        OSError: The kernel refuses: EPERM where it forbids it, EFAULT where nothing is mapped at
            the address, ESRCH where there is no such process, ENOSYS where it can't do it at all.
    """
    readv = _process_vm_readv()
    if readv is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    buffer = ctypes.create_string_buffer(nbytes)
    local, remote = _IoVec(ctypes.addressof(buffer), nbytes), _IoVec(address, nbytes)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    copied = readv(pid, ctypes.byref(local), one, ctypes.byref(remote), one, none)
    if copied < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return buffer.raw[:copied]


def same_host_path(pid: int, address: int) -> str:
    """Name the path to a process on this host: `CMA` or `TCP`, with a warning why not `CMA`."""
    choice = os.environ.get("UCX_TLS", "all")
    wanted = {name.strip() for name in choice.lstrip("^").split(",")}
    allowed = not (wanted & _WITH_CMA) if choice.startswith("^") else bool(wanted & _WITH_CMA)
    reason = ""
    try:
        copy_from(pid, address, 1)
    except OSError as error:
        # Nothing mapped there is the answer of a kernel that would have copied.
        if error.errno != errno.EFAULT:
            reason = errno.errorcode.get(error.errno or 0, str(error))
    if allowed and not reason:
        return CMA
    if not reason:
        performance.warn(performance.Cause.CMA_UNUSED, transports=choice)
    elif reason in ("EPERM", "ENOSYS"):
        performance.warn(performance.Cause.CMA_DENIED, reason=reason)
    return TCP
