"""A collective of device memory: the algorithm runs in the device's own thread.

It does so on a stream of its own, in memory that the caller's thread has made: see
[Note: no device calls in the driver] in `engine/streams.py`. Whoever waits or polls, see
[Note: who advances a collective], only has it go on there. It begins once all that was queued on
the current streams at the call has run, and lets streams that wait go on when its results are in
place: `p2p/ordered.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from torch_nixl.collectives.operation import Algorithm, CollectiveOperation, raise_for
from torch_nixl.collectives.protocol import Signature
from torch_nixl.engine.deferred import when
from torch_nixl.engine.streams import StreamOrder, device_of, order_of
from torch_nixl.p2p.ordered import Ordered

if TYPE_CHECKING:
    from torch_nixl.collectives.group import CollectiveGroup
    from torch_nixl.p2p.communicator import Communicator


class DeviceCollective(Ordered, CollectiveOperation):
    """One rank's part in a collective of which some tensor is on a device.

    Attributes:
        order: Its place among the work of its devices; None until it is prepared, and for good if
            it has failed by then.
    """

    __slots__ = ("_exchange", "_last", "_outs", "order")

    order: StreamOrder | None

    def __init__(
        self,
        group: CollectiveGroup,
        communicator: Communicator,
        signature: Signature,
        number: int,
        algorithm: Algorithm,
        outputs: Sequence[torch.Tensor],
        limit: float | None,
    ) -> None:
        super().__init__(group, communicator, signature, number, algorithm, outputs, limit)
        self._exchange = communicator._exchange
        self.order = None
        self._outs: tuple[torch.Tensor, ...] = ()
        self._last = False

    def prepare(self, moved: Sequence[torch.Tensor]) -> None:
        """Make its memory, and note what is queued on its devices. In the caller's thread."""
        super().prepare(moved)
        # What has gaps is copied, never moved itself.
        whole = [one for one in moved if one.is_contiguous()]
        self.hold_memory([one for one in whole if device_of(one) is not None])
        self.put_in_order(order_of(moved), tuple(self.outputs))

    def start(self) -> None:
        super().start()
        self._when_passed((self.order,), self._wake)

    def attend(self) -> bool:
        """Have the device's thread run the algorithm, if that can go on."""
        order = self.order
        running = self._running
        moved = False
        while not self._done and order is not None and order.passed():
            goes_on = False
            try:  # [Note: interrupts] in engine/progress.py
                if not running.acquire(blocking=False):
                    break  # Whoever holds it looks again.
                # The flag stays set while the device's thread has its turn: no lock could be
                # released there.
                has_turn = self._stepping
                if not has_turn:
                    try:
                        self._stepping = True
                        goes_on = self._is_due()
                    except Exception as error:  # noqa: BLE001 - ends the collective, on every rank
                        self._group.fail(self, error)
                    finally:
                        self._stepping = goes_on
                    if goes_on:
                        order.devices[0].run(self._turn, self._after_turn)
                        has_turn = moved = True
            finally:
                try:
                    running.release()
                except RuntimeError:
                    pass
            if has_turn:
                if self._stepping:
                    break  # At its end the device's thread looks again.
                continue  # It has ended, and may have found the lock taken.
            blocking = self._blocking
            if self._done or blocking is None:
                break
            if blocking is not self._watched:
                self._watched = blocking
                blocking.add_done_callback(self._wake)
            if not blocking._done:
                break
            # It ended meanwhile, and who noticed may have found it busy.
        return moved

    def _is_due(self) -> bool:
        """Whether the algorithm can go on; ends what has nothing left to do. Alone, as `_turn`."""
        if self._blocking is not None and not self._attend_parts():
            return False
        raise_for(self._blocking)
        if self._steps is not None:
            return True
        while (rest := self._unfinished()) is not None:
            self._blocking = rest
            if not self._attend_parts():
                return False
        self._end_well()
        return False

    def _turn(self) -> None:
        """Run the algorithm until it has to wait. In the device's thread."""
        while not self._done and (steps := self._steps) is not None:
            try:
                with self._mode():
                    self._blocking = next(steps)
            except StopIteration:
                self._steps = None
                return
            if self._blocking is not None and not self._blocking._done:
                return
            raise_for(self._blocking)

    def _after_turn(self, error: BaseException | None) -> None:
        self._stepping = False
        if error is not None:
            self._group.fail(self, error)
        if self._done:
            self._give_up_parts()
        else:
            self.attend()

    def end(self, error: BaseException) -> None:
        if not self._finish(error):
            return
        self._give_up_parts()
        self._limit_hold()
        when(self._is_quiet, self._release)

    def _is_quiet(self) -> bool:
        """Whether nothing touches its memory any more. It has failed."""
        return not self._stepping and all(part.released for part in list(self._parts))

    def _drop_steps(self) -> None:
        box: list[object] = [self._steps]
        super()._drop_steps()
        if self.order is not None:
            self.order.devices[0].discard(box)

    def abort(self, error: BaseException) -> None:
        self._group.forget(self)
        self._finish(error)
        when(lambda: not self._stepping, self._release)
