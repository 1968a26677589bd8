"""Which way bytes take between two processes, as far as it can be known.

NIXL does not tell, and UCX only logs it. What decides is whether the kernel lets one process copy
from the other (Cross Memory Attach) and whether the user's ``UCX_TLS`` allows that; both can be
looked at.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

CMA: Final = "cma"
TCP: Final = "tcp"
NETWORK: Final = "network"

_WITH_CMA = frozenset({"all", "shm", "sm", "mm", "cma"})


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def copy_error(pid: int, address: int) -> int:
    """Try to copy one byte from another process; return 0 or the errno.

    EFAULT says that the copy is allowed but that nothing is mapped at the address.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return errno.ENOSYS
    byte = ctypes.create_string_buffer(1)
    local, remote = _IoVec(ctypes.addressof(byte), 1), _IoVec(address, 1)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    if libc.process_vm_readv(pid, ctypes.byref(local), one, ctypes.byref(remote), one, none) < 0:
        return ctypes.get_errno()
    return 0


def same_host_path(pid: int, address: int) -> str:
    """Name the path to a process on this host: `CMA` or `TCP`."""
    choice = os.environ.get("UCX_TLS", "all")
    wanted = {name.strip() for name in choice.lstrip("^").split(",")}
    allowed = not (wanted & _WITH_CMA) if choice.startswith("^") else bool(wanted & _WITH_CMA)
    return CMA if allowed and copy_error(pid, address) in (0, errno.EFAULT) else TCP
