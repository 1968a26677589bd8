"""Sizes and times as people write them."""

from __future__ import annotations


def size_name(nbytes: int) -> str:
    """Bytes for people: ``"64 KiB"``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} B"


def parse_size(text: str) -> int:
    """The reverse of `size_name`; spaces, case and the ``iB`` may be missing.

    Raises:
        ValueError: It is no size.
    """
    units = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
    number = text.strip().lower().removesuffix("ib")
    unit = number[-1:] if number[-1:].isalpha() else ""
    number = number.removesuffix(unit).strip()
    if unit not in units or not number.replace(".", "", 1).isdigit():
        raise ValueError(f"{text!r} is no size: expected one like 8, 64k or 16MiB")
    nbytes = int(float(number) * units[unit])
    if nbytes < 1:
        raise ValueError(f"{text!r} is no size: expected at least one byte")
    return nbytes


def time_name(seconds: float) -> str:
    """Seconds for people: ``"17.4 us"``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
