"""Says, once per process and cause, that something is slower here than it could be.

Each warning goes to the logger ``torch_nixl.performance`` and says how to mend it.
``TORCH_NIXL_PERFORMANCE_WARNINGS=0`` silences all of them, and so does that logger's level.
"""

from __future__ import annotations

import enum
import logging
import os
from typing import Final

log = logging.getLogger("torch_nixl.performance")

SWITCH: Final = "TORCH_NIXL_PERFORMANCE_WARNINGS"
"""The environment variable that silences all warnings, set to 0."""

SMALL_SPAN_NBYTES: Final = 4096
MANY_SPANS: Final = 1024
"""A transfer of so many spans, smaller than `SMALL_SPAN_NBYTES` on average, is warned of."""

MANY_REGISTRATIONS: Final = 1024
"""Registrations after which it counts whether the cache ever helped."""


class Cause(enum.Enum):
    """What makes something slow, and the warning for it. `docs/troubleshooting.md` has each."""

    CMA_UNUSED = (
        "UCX_TLS={transports} keeps processes of one host on TCP, though they could copy from each "
        "other (CMA), which is several times faster: unset UCX_TLS, or add sm to it"
    )
    CMA_DENIED = (
        "the kernel forbids processes of this host to copy from each other (CMA: {reason}), so "
        "bytes go by TCP, several times slower: in a container, start it with "
        "--cap-add=SYS_PTRACE; `torch-nixl doctor` says what else it can be"
    )
    HOST_STAGING = (
        "device memory is registered, but UCX has not loaded its module for it ({module}), so "
        "bytes are copied through host memory: install the nixl wheel of torch's CUDA version, and "
        "see `torch-nixl doctor`"
    )
    SMALL_SPANS = (
        "a transfer of {nbytes} bytes goes in {count} pieces that no neighbours could be merged "
        "with, about 5 us each: use larger pages, or neighbouring ones"
    )
    REGISTRATION_PER_CALL = (
        "{count} stretches of memory were registered, and {hits} found registered: memory that is "
        "sent or received once costs a registration each time; use the same tensors again"
    )


_warned: set[Cause] = set()


def warn(cause: Cause, **values: object) -> None:
    """Warn of a cause, unless that was done before or warnings are switched off."""
    if cause in _warned:
        return
    _warned.add(cause)
    if os.environ.get(SWITCH, "1") != "0":
        log.warning("%s (%s=0 silences this)", cause.value.format(**values), SWITCH)


def forget() -> None:
    """Warn of everything again: for tests."""
    _warned.clear()


def look_at_registrations(count: int, hits: int) -> None:
    """Warn if the registration cache hardly ever helps."""
    if count % MANY_REGISTRATIONS == 0 and hits < count // 10:
        warn(Cause.REGISTRATION_PER_CALL, count=count, hits=hits)


def look_at_spans(count: int, nbytes: int) -> None:
    """Warn if a transfer is of many small pieces."""
    if count >= MANY_SPANS and nbytes < count * SMALL_SPAN_NBYTES:
        warn(Cause.SMALL_SPANS, count=count, nbytes=nbytes)


def look_at_device_memory(module: str = "libuct_cuda") -> None:
    """Warn if this process has device memory registered and UCX no module for it."""
    if Cause.HOST_STAGING in _warned:
        return
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            loaded = any(module in line for line in maps)
    except OSError:
        return
    if not loaded:
        warn(Cause.HOST_STAGING, module=module)
