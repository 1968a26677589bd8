"""Works of a process group that a device's stream can wait for, on the loopback adapter."""

from __future__ import annotations

import datetime
import threading

import torch
from p2p.conftest import World, fabric, path, world

from torch_nixl.process_group.work import GroupWork, Together
from torch_nixl.testing import FakeDevice

__all__ = ["fabric", "path", "world"]


def test_synchronize_blocks_the_host_though_wait_leaves_it_to_the_stream(world: World) -> None:
    a, b = world(2)
    device = FakeDevice()
    outs = [device.zeros(100), device.zeros(100)]
    works = [GroupWork(b.irecv(0, out=one, tag=tag), [one]) for tag, one in enumerate(outs)]
    for work in works:
        assert work.wait()
        assert not work.is_completed()
    seen: list[bool] = []

    def synchronize() -> None:
        GroupWork(Together(works), outs).synchronize()
        seen.append(all(work.is_completed() for work in works))

    thread = threading.Thread(target=synchronize)
    thread.start()
    a.send(torch.full((100,), 3.0), 1, tag=0)
    works[0].synchronize()
    assert thread.is_alive()
    a.send(torch.full((100,), 4.0), 1, tag=1)
    thread.join(20)
    assert seen == [True]
    assert [float(one[-1]) for one in outs] == [3.0, 4.0]
    assert works[0].wait(datetime.timedelta(seconds=1))
