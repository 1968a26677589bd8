"""Moving pages: a plan for each group of layers, cut into pieces for the engine."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.transfer import Piece, TransferOperation
from torch_nixl.errors import TorchNixlError
from torch_nixl.kv.compatibility import Compatibility
from torch_nixl.kv.plan import Plan, Run, make_plan
from torch_nixl.kv.pools import Pool

if TYPE_CHECKING:
    from torch_nixl.engine.blob import BlobInfo
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.registry import RegisteredMemory
    from torch_nixl.engine.remotes import Remote

PIECE_BYTES: Final = 8 << 20
"""Most bytes of pages in one post. Over CMA it copies before it returns: 8 MiB take about 1.5 ms,
while which frames of other requests have to wait."""

PIECE_SPANS: Final = 512
"""Most spans in one post, for the same reason: about 5 us each where they are scattered."""


class Moves:
    """All that moves for one request between two caches, layer by layer or at once.

    Args:
        src: The cache that tokens come from.
        src_runs: Its pages, for each group.
        dst: The cache that they go to.
        dst_runs: Its pages, for each group. A group whose pages begin after `start` is filled from
            there on: a sliding window wants no more.
        start: Position of the first token.
        stop: Position after the last.
        heads: Which of the model's heads, for each group.
        by_layer: Whether layers are to be moved apart.

    Raises:
        ValueError: A page does not exist, or the source's don't hold these positions.
    """

    def __init__(
        self,
        src: Pool,
        src_runs: Sequence[Run],
        dst: Pool,
        dst_runs: Sequence[Run],
        *,
        start: int,
        stop: int,
        heads: Sequence[range],
        by_layer: bool,
    ) -> None:
        if len(src_runs) != len(src.layouts) or len(dst_runs) != len(dst.layouts):
            raise ValueError(f"pages of {len(src_runs)} and {len(dst_runs)} groups")
        self._src, self._dst = src, dst
        self._order = order_of(src.compatibility)
        self._by_layer = by_layer
        self.plans: list[Plan] = []
        for group, (ours, theirs) in enumerate(zip(src_runs, dst_runs, strict=True)):
            begin = min(max(start, theirs.first), stop)
            self.plans.append(
                make_plan(
                    src.layouts[group],
                    ours,
                    dst.layouts[group],
                    theirs,
                    start=begin,
                    stop=stop,
                    heads=heads[group],
                    by_layer=by_layer,
                )
            )
        self.nbytes = sum(plan.nbytes for plan in self.plans)
        self.num_spans = sum(plan.num_spans for plan in self.plans)

    @property
    def num_layers(self) -> int:
        return len(self._order)

    def pieces(self, layers: range, *, pull: bool) -> Iterator[Piece]:
        """Cut some layers, by their rank in the order in which the model computes them."""
        whole = len(layers) == self.num_layers
        assert whole or self._by_layer
        for group, plan in enumerate(self.plans):
            numbers = self._src.compatibility.layers[group]
            chosen = None
            if not whole:
                first, last = self._order[layers.start], self._order[layers.stop - 1]
                chosen = range(bisect_left(numbers, first), bisect_left(numbers, last + 1))
            for src, dst in plan.pieces(
                self._src.regions[group],
                self._dst.regions[group],
                max_bytes=PIECE_BYTES,
                max_spans=PIECE_SPANS,
                layers=chosen,
            ):
                if pull:
                    yield self._dst.kind, dst, self._src.kind, src
                else:
                    yield self._src.kind, src, self._dst.kind, dst


def order_of(compatibility: Compatibility) -> list[int]:
    """The model's numbers of all layers, in the order in which it computes them."""
    return sorted(layer for layers in compatibility.layers for layer in layers)


class Owner(Protocol):
    """What moves pages: one side of one request."""

    attended: int

    def on_moved(self, transfer: PageTransfer, error: BaseException | None) -> None:
        """Take note that nothing that was started for it moves any more."""
        ...


class PageTransfer(TransferOperation):
    """Moves some layers of one request, once the library knows of the remote's cache.

    It belongs to a handoff, which is what programs wait for.
    """

    __slots__ = ("_blobs", "_infos", "_owner", "_pool_memories", "_told", "layers", "num_posted")

    starts_counted = False

    def __init__(
        self,
        connection: Connection,
        remote: Remote,
        owner: Owner,
        direction: Direction,
        pieces: Iterator[Piece],
        layers: range,
        *,
        memories: tuple[RegisteredMemory, ...],
        blobs: Sequence[bytes],
        infos: Sequence[BlobInfo],
    ) -> None:
        self._owner = owner
        super().__init__(connection, remote, direction, (), (), name="pages")
        self._pieces = self._counted(pieces)
        self.num_posted = 0
        self._pool_memories = memories
        self._blobs, self._infos = blobs, infos
        self._told = False
        self.layers = layers

    def _counted(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self.num_posted += 1
            yield piece

    # Whoever waits for the owner moves this, too.
    @property
    def attended(self) -> int:
        return self._owner.attended

    @attended.setter
    def attended(self, value: int) -> None:
        pass

    @property
    def memories(self) -> tuple[RegisteredMemory, ...]:
        return () if self._released else self._pool_memories

    def start(self) -> None:
        """Let it move, by whoever waits for the owner or in the background.

        Raises:
            ClosedError: The connection was closed meanwhile.
        """
        self._connection.operations.add(self)
        self._connection.progress.kick()

    def stop(self, error: BaseException) -> None:
        """Post no more; what is under way is still to become final."""
        if self._finish(error):
            self._connection.progress.kick()

    def _advance(self) -> bool:
        if not self._told and not self._done:
            assert self.remote is not None
            try:
                if not self._connection.contacts.learn(self.remote, self._blobs, self._infos):
                    return False
            except TorchNixlError as error:
                self._break(error)
                return True
            self.counted = True
            self._told = True
        return super()._advance()

    def _count_end(self, error: BaseException | None) -> None:
        """Count nothing: the handoff does, with the bytes of all its parts."""

    def _settle(self) -> None:
        if self._direction is Direction.READ and not self._done:
            # The owner may have withdrawn the pages before our last read was final. Its word has
            # then arrived before anything that it wrote afterwards could be read.
            self._connection.progress.sweep()
        self._owner.on_moved(self, self._error)
        self._finish(None)
        self._release()
        self._release_spent()
