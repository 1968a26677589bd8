"""How values of several ranks become one: which operation is defined for which dtype, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from torch_nixl.engine.streams import StreamDevice

ReduceOp: TypeAlias = "dist.ReduceOp | dist.ReduceOp.RedOpType"

_HALVES: Final = frozenset({torch.float16, torch.bfloat16})
_FLOATS: Final = _HALVES | {torch.float32, torch.float64}
_COMPLEX: Final = frozenset({torch.complex64, torch.complex128})
_INTEGERS: Final = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_BOOL: Final = frozenset({torch.bool})

# torch adds none of these: in two's complement the sum of the same bits as signed is the same.
_AS_SIGNED: Final = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
_UNSIGNED: Final = frozenset(_AS_SIGNED)
_BITS: Final = _INTEGERS | _UNSIGNED | _BOOL

_DEFINED: Final[dict[str, frozenset[torch.dtype]]] = {
    "sum": _FLOATS | _COMPLEX | _BITS,
    "avg": _FLOATS | _COMPLEX,
    "product": _FLOATS | _COMPLEX | _BITS,
    "min": _FLOATS | _INTEGERS | _BOOL,
    "max": _FLOATS | _INTEGERS | _BOOL,
    "band": _BITS,
    "bor": _BITS,
    "bxor": _BITS,
    "premul_sum": _FLOATS | _COMPLEX,
}

_FUNCTIONS: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
    "premul_sum": torch.add,
}


@dataclass(frozen=True, slots=True)
class Reduction:
    """One operation on one dtype.

    Attributes:
        name: ``"sum"``, ``"avg"``, ``"product"``, ``"min"``, ``"max"``, ``"band"``, ``"bor"``,
            ``"bxor"`` or ``"premul_sum"``.
        dtype: What is reduced.
        factor: What each value is multiplied with first; 1 but for ``"premul_sum"``.
    """

    name: str
    dtype: torch.dtype
    factor: float = 1.0

    @property
    def wide(self) -> bool:
        """Whether it is accumulated in float32, and rounded once at the end."""
        return self.dtype in _HALVES

    def total_dtype(self, count: int, place: int | None) -> torch.dtype | None:
        """What `combine` of so many values accumulates in besides its output; None for nothing.

        Args:
            count: How many.
            place: Which of them is the output; None if none is.
        """
        if self.wide and count > 1:
            return torch.float32
        return self.dtype if place is not None and place >= self._num_read_first else None

    @property
    def _num_read_first(self) -> int:
        """Values that are read before anything is written: the output may be one of them."""
        return 1 if self.name == "premul_sum" else 2

    def combine(
        self, values: Sequence[torch.Tensor], out: torch.Tensor, room: torch.Tensor | None
    ) -> None:
        """Reduce equally long values, in their order, into `out`. Allocates nothing.

        Args:
            values: ``[n]`` each, one from each rank.
            out: ``[n]``. May be one of the values, no part of it another's.
            room: Of `total_dtype`, any length: so many elements are reduced at a time.
        """
        step = out.numel() if room is None else room.numel()
        for start in range(0, out.numel(), step or 1):
            part = slice(start, start + step)
            self._combine([value[part] for value in values], out[part], room)

    def _combine(
        self, values: Sequence[torch.Tensor], out: torch.Tensor, room: torch.Tensor | None
    ) -> None:
        if room is not None:
            room = room[: out.numel()]
        signed = _AS_SIGNED.get(self.dtype)
        if signed is not None:
            values = [value.view(signed) for value in values]
            out = out.view(signed)
            room = None if room is None else room.view(signed)
        if self.wide and len(values) > 1:
            assert room is not None
            total = self._accumulate(values, room)
            self._finish(total, len(values))
            out.copy_(total)
            return
        # In place, unless that would overwrite a value that comes later.
        address = out.data_ptr()
        late = any(value.data_ptr() == address for value in values[self._num_read_first :])
        total = out
        if late and out.numel():
            assert room is not None
            total = room
        self._accumulate(values, total)
        self._finish(total, len(values))
        if total is not out:
            out.copy_(total)

    def _accumulate(self, values: Sequence[torch.Tensor], total: torch.Tensor) -> torch.Tensor:
        function = _FUNCTIONS[self.name]
        first = values[0]
        if self.name == "premul_sum":
            torch.mul(first, self.factor, out=total) if not self.wide else total.copy_(first).mul_(
                self.factor
            )
            for value in values[1:]:
                total.add_(value, alpha=self.factor)
            return total
        if len(values) == 1:
            if total.data_ptr() != first.data_ptr():
                total.copy_(first)
            return total
        if total.dtype is first.dtype:
            function(first, values[1], out=total)
        else:
            total.copy_(first)
            function(total, values[1], out=total)
        for value in values[2:]:
            function(total, value, out=total)
        return total

    def _finish(self, total: torch.Tensor, count: int) -> None:
        if self.name == "avg":
            total.div_(count)

    def __str__(self) -> str:
        return self.name if self.name != "premul_sum" else f"{self.name} {self.factor!r}"


_loaded: set[tuple[str, str, torch.dtype, int]] = set()


def load_kernels(device: StreamDevice, how: Reduction, count: int) -> None:
    """Run a reduction of so many values once, in the caller's thread, so that a device has it.

    See [Note: no device calls in the driver] in `engine/streams.py`. Aligned memory and other may
    take different kernels.
    """
    key = (device.name, how.name, how.dtype, count)
    if key in _loaded:
        return
    dtype = how.total_dtype(count, count - 1)
    values = [device.empty((1027,), how.dtype).zero_() for _ in range(count)]
    room = None if dtype is None else device.empty((1027,), dtype)
    for start in (0, 1):
        parts = [value[start:] for value in values]
        how.combine(parts, parts[-1], None if room is None else room[start:])
    _loaded.add(key)


def reduction(op: ReduceOp, dtype: torch.dtype) -> Reduction:
    """Make the reduction that `op` stands for.

    Args:
        op: One of torch's, or what it stands for by name.
        dtype: What is to be reduced.

    Raises:
        TypeError: It is not defined for that dtype, or no operation.
    """
    kind = getattr(op, "op", op)
    name = str(getattr(kind, "name", kind)).lower()
    defined = _DEFINED.get(name)
    if defined is None:
        raise TypeError(f"op={op!r}: expected one of torch.distributed.ReduceOp")
    if dtype not in defined:
        raise TypeError(f"{name} is not defined for {dtype}")
    factor = 1.0
    if name == "premul_sum":
        given = getattr(op, "factor", None)
        if given is None:
            raise TypeError("premul_sum needs a factor: torch.distributed._make_nccl_premul_sum")
        factor = float(given)
    # Of truth values the sum is whether any is true, the product whether all are.
    if dtype is torch.bool:
        name = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}.get(name, name)
    return Reduction(name, dtype, factor)
