"""A channel's steps, once its two ends have agreed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.indexed import IndexedRows
from torch_nixl.engine.streams import order_of
from torch_nixl.errors import (
    ClosedError,
    MetadataError,
    PeerLostError,
    TorchNixlError,
    TransferError,
)
from torch_nixl.p2p import protocol, terms
from torch_nixl.p2p.agreement import Agreement, do
from torch_nixl.p2p.buffers import Buffer
from torch_nixl.p2p.ordered import Job, run_in_turn
from torch_nixl.p2p.protocol import Route
from torch_nixl.p2p.step import DeviceStep, StepMove, StepOperation
from torch_nixl.p2p.tensors import from_bytes, join
from torch_nixl.p2p.terms import Role


class Session(Agreement):
    """One agreement of a channel's two ends, and its steps, one at a time."""

    __slots__ = ()

    def post(self, role: Role, deadline: float | None, *, waiting: bool) -> StepOperation:
        """Begin a step.

        Raises:
            ValueError: The tensors can't be received into, or one of them has moved.
            TransferError: The last step is still under way, or the channel is broken.
        """
        last = self._step
        if last is not None and last.order is not None and last.order.held:
            last.wait()  # Its program has waited for it, by a stream.
        self._check()
        for one in self._buffers:
            if not one.in_place:
                moved = (
                    f"like{one.path}: it has been resized, or its memory has moved, since the "
                    f"channel was made: {self} has to be reconnected"
                )
                self.fail(TransferError(moved))
                raise ValueError(moved)
        if role is Role.SEND:
            for one in self._buffers:
                if not self._eager and one.packed and one.device is None:
                    one.pack()
        elif self._unwritable:
            raise ValueError(f"this end can't receive: {self._unwritable}")
        outs = self._on_devices
        order = order_of(outs) if outs else None
        index = self._index
        with self.exchange.lock:
            self._check()
            step: StepOperation
            if order is None:
                step = StepOperation(self, index, role, deadline, waiting=waiting)
            else:
                outs = outs if role is Role.RECEIVE else ()
                step = DeviceStep(self, index, role, deadline, order, outs, waiting=waiting)
            self._step = step
            act = self._begin(step) if self._agreed and step.ready else None
        do(act)
        if isinstance(step, DeviceStep):
            step.when_passed(lambda: self._pack(step))
        return step

    def _pack(self, step: StepOperation) -> None:
        """Have devices' threads bring what is sent to where it is moved from."""
        jobs: list[Job] = []
        if step.role is Role.SEND:
            jobs = self._jobs(Buffer.pack_on, to_host=self._eager)
        run_in_turn(jobs, lambda error: self._get_ready(step, error))

    def _jobs(self, work: Callable[..., None], **how: bool) -> list[Job]:
        """What devices' threads have to do for their tensors."""
        return [
            (one.device, functools.partial(work, one, one.device, **how))
            for one in self._buffers
            if one.device is not None and one.memory.nbytes and (one.packed or any(how.values()))
        ]

    def _get_ready(self, step: StepOperation, error: BaseException | None) -> None:
        """The bytes of a step may be touched."""
        if error is not None:
            self.fail(TransferError(f"{step}: could not pack what is sent: {error}"))
            return
        with self.exchange.lock:
            if self._step is not step or self.broken is not None:
                return
            step.ready = True  # type: ignore[misc]  # not of one without a device
            act = self._begin(step) if self._agreed else None
        do(act)

    def _check(self) -> None:
        broken = self.broken
        if broken is not None:
            raise copy.copy(broken) from broken.__cause__
        if self.exchange.closed is not None:
            raise ClosedError(str(self.exchange.closed))
        if self.exchange.poisoned is not None:
            self.exchange.check_poison()
        if self._step is not None:
            raise TransferError(f"{self._step} is still under way: wait for it first")

    def enlist(self, step: StepOperation) -> None:
        """Enter a step in the tables: it has a deadline now, its peer is looked after and told."""
        try:
            with self.exchange.lock:
                if step.done or step.listed:
                    return
                self.connection.operations.add(step)
                step.listed = True
                if step.begun and not step.announced:
                    self._announce(step, 0)
        except ClosedError as error:
            self.fail(error)
            return
        self.exchange.watch(step, self.peer)
        self._forget_ended(step)
        self.connection.progress.kick()

    def _begin(self, step: StepOperation) -> Callable[[], None] | None:
        """Say how a step's bytes go, the ends having agreed. Holds the lock."""
        step.begun = True
        sends = step.role is Role.SEND
        if self._eager:
            step.route = Route.EAGER
            step.owes, step.expects = not sends, sends
            if sends:
                self._send_bytes(step)
            elif step.listed:
                self._announce(step, 0)
            return self._look_ready(step)
        step.route = Route.READ if self._reads else Route.WRITE
        step.owes = sends is not self._reads
        step.expects = not step.owes
        if step.expects:
            self._exposed = True
            self._announce(step, terms.WAITING if step.waiting and sends else 0)
        elif step.listed:
            self._announce(step, 0)
        return self._look_ready(step)

    def _look_ready(self, step: StepOperation) -> Callable[[], None] | None:
        """Go on if the other end was here first. Holds the lock."""
        ready = self._ready
        if ready is not None and ready[0] == step.index:
            return self._meet(step, ready[1], ready[2])
        return None

    def _send_bytes(self, step: StepOperation) -> None:
        step.announced = True
        exchange = self.exchange
        body = terms.pack_moved(exchange.context, self.number, step.index)
        if len(self._buffers) == 1:
            body = join(body, self._buffers[0].on_host)
        else:
            body = b"".join([body, *(join(b"", one.on_host) for one in self._buffers)])
        exchange.send(self.peer, terms.BYTES, body)

    def on_bytes(self, index: int, body: bytes) -> None:
        """The other end has begun a step, and its bytes are here. Runs in the driver."""
        with self.exchange.lock:
            nbytes = len(body) - terms.BYTES_AT
            if not self._eager or nbytes != self._total or self._data:
                raise MetadataError(f"{self}: {nbytes} bytes that don't belong to a step")
            self._check_index(index)
            self._data = body
        self.on_ready(index, Role.SEND, 0)

    def _land(self, step: StepOperation, data: bytes) -> None:
        """Copy a step's bytes to where they belong."""
        at = terms.BYTES_AT
        alone = len(self._buffers) == 1
        error: TorchNixlError | None = None
        try:
            for one in self._buffers:
                end = at + one.description.nbytes
                if alone:
                    from_bytes(one.description, data, at, one.on_host, None)
                else:
                    from_bytes(one.description, data[at:end], 0, one.on_host, None)
                at = end
        except (RuntimeError, ValueError) as caught:
            error = TransferError(f"{step}: could not copy what came: {caught}")
        if error is not None or step.order is None:
            self._part_moved(step, error)
            return

        def then(failure: BaseException | None) -> None:
            if failure is not None:
                failure = TransferError(f"{step}: could not copy what came: {failure}")
            self._part_moved(step, failure)

        run_in_turn(self._jobs(Buffer.unpack_on, from_host=True), then)

    def _check_index(self, index: int) -> None:
        if not self._index <= index <= self._index + 1:
            raise MetadataError(f"{self}: ready for step {index}, expected {self._index}")

    def _announce(self, step: StepOperation, flags: int) -> None:
        step.announced = True
        exchange = self.exchange
        body = terms.pack_ready(exchange.context, self.number, step.index, step.role, flags)
        exchange.send(self.peer, terms.READY, body)

    def on_ready(self, index: int, role: Role, flags: int) -> None:
        """The other end has begun a step. Runs in the driver."""
        with self.exchange.lock:
            self._check_index(index)
            self._ready = (index, role, flags)
            step = self._step
            if self.broken or step is None or not step.begun or step.index != index:
                return
            act = self._meet(step, role, flags)
        do(act)

    def _meet(self, step: StepOperation, role: Role, flags: int) -> Callable[[], None] | None:
        """Both ends have begun a step: move what is ours to move. Holds the lock."""
        if role is step.role:
            verb = "send" if role is Role.SEND else "receive"
            error = TransferError(f"{self}: both ends {verb} in step {step.index}")
            return lambda: self.fail(error)
        if self._eager:
            if not step.owes:
                return None
            data, self._data = self._data, b""
            if not data:
                missing = MetadataError(f"{self}: ready for step {step.index} without its bytes")
                return lambda: self.fail(missing)
            return lambda: self._land(step, data)
        if step.moves:
            return None
        if self._reads and step.role is Role.SEND:
            if not flags & terms.SPLIT or not self._rows.second:
                return None
            step.route, step.owes = Route.SPLIT, True
            return self._move(step, Direction.WRITE, self._rows.second)
        if not step.owes:
            return None
        if step.role is Role.SEND:
            return self._move(step, Direction.WRITE, self._rows.whole)
        wants_half = flags & terms.WAITING and self._total >= protocol.SPLIT_NBYTES
        if not (wants_half and self._rows.first and self._rows.second):
            return self._move(step, Direction.READ, self._rows.whole)
        step.route, step.expects = Route.SPLIT, True
        self._exposed = True
        self._announce(step, terms.SPLIT)
        return self._move(step, Direction.READ, self._rows.first)

    def _move(
        self, step: StepOperation, direction: Direction, rows: list[IndexedRows]
    ) -> Callable[[], None] | None:
        """Start to move rows. Holds the lock."""
        if not rows:
            return lambda: self._part_moved(step, None)
        try:
            move = StepMove(step, direction, rows)
            step.moves.append(move)
            move.start()
        except TorchNixlError as caught:
            error = caught
            step.moves.clear()
            return lambda: self.fail(error)
        step.ring()
        return None

    def on_part_moved(
        self, step: StepOperation, move: StepMove, error: BaseException | None
    ) -> None:
        """What this end had started is final."""
        with self.exchange.lock:
            if move in step.moves:
                step.moves.remove(move)
        self._part_moved(step, error)

    def _part_moved(self, step: StepOperation, error: BaseException | None) -> None:
        exchange = self.exchange
        if error is not None:
            self.fail(self._lost(error) if isinstance(error, PeerLostError) else error)
        with exchange.lock:
            if self.broken is None:
                body = terms.pack_moved(exchange.context, self.number, step.index)
                exchange.send(self.peer, terms.MOVED, body)
                step.owes = False
        self._conclude(step)

    def on_moved(self, index: int) -> None:
        """The other end has moved its part. Runs in the driver."""
        with self.exchange.lock:
            step = self._step
            if self.broken is not None:
                return
            if step is None or step.index != index or not step.expects:
                raise MetadataError(f"{self}: moved something in step {index}, unasked")
            step.expects = False
            self._exposed = False
        self._conclude(step)

    def _conclude(self, step: StepOperation) -> None:
        """End a step whose parts have moved, or a session that failed and is quiet."""
        if self.broken is not None:
            self._settle()
            return
        with self.exchange.lock:
            if step.owes or step.expects or step.ending or self.broken:
                return
            step.ending = True
        if step.role is not Role.RECEIVE or not self.packed or self._eager:
            self._end_step(step, None)
            return
        error: BaseException | None = None
        try:
            for one in self._buffers:
                if one.device is None:
                    one.unpack()
        except RuntimeError as caught:
            error = caught
        jobs = [] if error else self._jobs(Buffer.unpack_on, from_host=False)
        run_in_turn(jobs, lambda failure: self._end_step(step, error or failure))

    def _end_step(self, step: StepOperation, error: BaseException | None) -> None:
        """All that a step moves is in place, or can't be put there."""
        failure: TransferError | None = None
        if error is not None:
            failure = TransferError(f"{step}: could not unpack what came: {error}")
        with self.exchange.lock:
            if self.broken is not None:
                return  # Its time was up meanwhile.
            self._step = None
            self._index += 1
        step.finish(failure)
        self._forget_ended(step)
        step.release()
        if failure is not None:
            self.fail(failure)
        elif self._orphaned:
            self.abandon()

    def what_it_waits_for(self) -> str:
        """Why a step has not begun to move, for its timeout."""
        if self._step is not None and not self._step.ready:
            return "before what its device's stream had queued has run"
        if self.theirs is None:
            return "before the other end made this channel"
        if not self._agreed:
            return "before the other end was prepared"
        return "before the other end did its part"
