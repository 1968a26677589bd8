"""The registration cache: keyed by what owns memory, never by an address alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from torch_nixl.engine.adapter import Adapter, Direction, MemoryKind, Region, Registration
from torch_nixl.engine.arrays import as_memory
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.loopback import LoopbackFabric
from torch_nixl.engine.memory import address_memory, tensor_memory
from torch_nixl.engine.registry import PUBLIC_DEVICE_ID, RegisteredMemory, Registry
from torch_nixl.errors import ClosedError, RegistrationError


@pytest.fixture
def adapter(adapter_factory: Callable[[str], Adapter]) -> Iterator[Adapter]:
    adapter = adapter_factory("registry")
    yield adapter
    adapter.close()


@pytest.fixture
def registry(adapter: Adapter) -> Registry:
    return Registry(adapter)


def test_all_views_of_a_storage_share_one_registration(registry: Registry) -> None:
    storage = torch.zeros(10_000, 8)
    held = [registry.acquire(tensor_memory(row)) for row in storage]
    assert registry.statistics.registrations == 1
    for one in held:
        registry.release(one)
    assert registry.statistics.live == 1
    del storage, held, one
    gc.collect()
    registry.collect()
    assert registry.statistics.live == registry.statistics.live_bytes == 0
    assert registry.statistics.deregistrations == 1


def test_a_registration_does_not_keep_its_tensor_alive(registry: Registry) -> None:
    tensor = torch.zeros(1000)
    registry.release(registry.acquire(tensor_memory(tensor)))
    gone: list[bool] = []

    weakref.finalize(tensor.untyped_storage(), gone.append, True)
    del tensor
    gc.collect()
    assert gone


def test_memory_in_use_outlives_its_owner_and_is_deregistered_after(registry: Registry) -> None:
    tensor = torch.zeros(1000)
    held = registry.acquire(tensor_memory(tensor))
    del tensor
    gc.collect()
    registry.collect()
    assert registry.statistics.live == 1
    registry.release(held)
    del held
    gc.collect()
    registry.collect()
    assert registry.statistics.live == 0


def test_a_storage_that_moved_is_registered_anew(registry: Registry) -> None:
    tensor = torch.zeros(16)
    first = registry.acquire(tensor_memory(tensor))
    tensor.untyped_storage().resize_(1 << 20)
    second = registry.acquire(tensor_memory(tensor))
    assert second.device_id != first.device_id
    assert registry.statistics.registrations == 2
    registry.release(first)
    registry.release(second)
    assert registry.statistics.live == 1


def test_a_larger_view_of_recycled_memory_is_covered_whole(registry: Registry) -> None:
    """Field report B1: the address is the same, the extent is not."""
    arena = bytearray(64)
    small = torch.frombuffer(arena, count=16, dtype=torch.uint8)
    held = registry.acquire(tensor_memory(small))
    registry.release(held)
    del small, held
    gc.collect()
    large = torch.frombuffer(arena, count=64, dtype=torch.uint8)
    held = registry.acquire(tensor_memory(large))
    assert held.entry is not None
    assert held.entry.registration.region.nbytes == 64


def test_the_same_address_and_size_gets_its_old_device_id_back(registry: Registry) -> None:
    """[Note: recycled memory]: what remotes were told doesn't grow with every allocation."""
    arena = bytearray(64)
    ids = set()
    for _ in range(100):
        tensor = torch.frombuffer(arena, dtype=torch.uint8)
        held = registry.acquire(tensor_memory(tensor))
        ids.add(held.device_id)
        registry.release(held)
        del tensor, held
    assert len(ids) == 1


def test_nested_and_overlapping_registrations_are_separate(registry: Registry) -> None:
    arena = np.zeros(1 << 16, dtype=np.uint8)
    base = arena.ctypes.data
    held = [
        registry.acquire(address_memory(base + start, nbytes, kind=MemoryKind.DRAM, owner=arena))
        for start, nbytes in ((0, 1 << 16), (4096, 4096), (6000, 9000), (0, 8192))
    ]
    assert len({one.device_id for one in held}) == 4
    for one in held:
        registry.release(one)
    assert registry.statistics.live == 0


def test_memory_without_an_owner_is_registered_while_in_use(registry: Registry) -> None:
    data = b"x" * 1000
    first = registry.acquire(as_memory(data))
    second = registry.acquire(as_memory(data))
    assert registry.statistics.registrations == 1
    registry.release(first)
    assert registry.statistics.live == 1
    registry.release(second)
    assert registry.statistics.live == 0


def test_empty_memory_needs_no_registration(registry: Registry) -> None:
    held = registry.acquire(tensor_memory(torch.empty(0, 3)))
    assert registry.statistics.registrations == 0
    registry.release(held)


def test_public_memory_is_registered_under_the_public_device_id_too(registry: Registry) -> None:
    held = registry.acquire(tensor_memory(torch.zeros(10)), public=True)
    assert held.device_id != PUBLIC_DEVICE_ID
    assert held.entry is not None
    assert held.entry.public is not None
    assert held.entry.public.region.device_id == PUBLIC_DEVICE_ID


def test_no_region_is_ever_registered_twice_under_one_device_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NIXL crashes when one of two equal registrations goes while transfers use the other."""
    fabric = LoopbackFabric()
    adapter = fabric.adapter("a")
    live: list[Region] = []
    register, deregister = adapter.register, adapter.deregister

    def checked_register(region: Region) -> Registration:
        assert region not in live
        live.append(region)
        return register(region)

    def checked_deregister(registration: Registration) -> None:
        live.remove(registration.region)
        deregister(registration)

    monkeypatch.setattr(adapter, "register", checked_register)
    monkeypatch.setattr(adapter, "deregister", checked_deregister)
    registry = Registry(adapter)
    arena = bytearray(64)
    for _ in range(10):
        one = torch.frombuffer(arena, dtype=torch.uint8)
        two = torch.frombuffer(arena, dtype=torch.uint8)
        held = [registry.acquire(tensor_memory(tensor), public=True) for tensor in (one, two)]
        del one, two
        for each in held:
            registry.release(each)
        del held, each
    registry.collect()
    assert live == []


def test_the_budget_evicts_the_least_recently_used_that_nobody_uses(adapter: Adapter) -> None:
    registry = Registry(adapter, max_bytes=10_000)
    tensors = [torch.zeros(1000, dtype=torch.uint8) for _ in range(30)]
    in_use = registry.acquire(tensor_memory(tensors[0]))
    for tensor in tensors[1:]:
        registry.release(registry.acquire(tensor_memory(tensor)))
    assert registry.statistics.live_bytes <= 10_000
    hits = registry.statistics.hits
    for memory in (in_use.memory, tensor_memory(tensors[29])):
        registry.release(registry.acquire(memory))
    assert registry.statistics.hits == hits + 2
    registry.release(registry.acquire(tensor_memory(tensors[1])))
    assert registry.statistics.hits == hits + 2


def test_a_refused_registration_is_raised_and_leaves_nothing() -> None:
    """Field report B13, and B10's step that raises between register and build."""
    fabric = LoopbackFabric()
    adapter = fabric.adapter("a")
    registry = Registry(adapter)
    fabric.fail_next(adapter, "register")
    tensor = torch.zeros(10)
    with pytest.raises(RegistrationError):
        registry.acquire(tensor_memory(tensor))
    assert registry.statistics.live == 0
    registry.release(registry.acquire(tensor_memory(tensor)))
    assert registry.statistics.live == 1


def test_a_closed_registry_refuses_and_still_takes_back(registry: Registry) -> None:
    held = registry.acquire(tensor_memory(torch.zeros(10)))
    registry.close()
    registry.release(held)
    with pytest.raises(ClosedError):
        registry.acquire(tensor_memory(torch.zeros(10)))


class _FixedIds:
    """An adapter whose device ids are the devices': every registration shares one id."""

    def __init__(self) -> None:
        self.fabric = LoopbackFabric(free_device_ids=())

    def connection(self, name: str) -> Connection:
        return Connection(self.fabric.adapter(name), timeout=10)


def test_where_device_ids_are_not_free_the_reader_makes_room() -> None:
    """[Note: device ids]: told [1M, 2M), freed, then [0, 64M) told; a READ at 10M must work."""
    world = _FixedIds()
    owner, reader = world.connection("owner"), world.connection("reader")
    million = 1 << 20
    arena = torch.randint(0, 255, (64 * million,), dtype=torch.uint8)

    def read(start: int, nbytes: int, exposed_nbytes: int) -> torch.Tensor:
        memory = address_memory(
            arena.data_ptr() + start, exposed_nbytes, kind=MemoryKind.DRAM, owner=arena
        )
        target = torch.zeros(exposed_nbytes, dtype=torch.uint8)
        exposed = owner.expose(Direction.READ, [memory])
        reader.claim(exposed.offer(), [tensor_memory(target)]).wait()
        exposed.wait()
        return target[:nbytes]

    assert torch.equal(read(million, million, million), arena[million : 2 * million])
    assert torch.equal(read(0, 64 * million, 64 * million), arena)
    assert torch.equal(read(million, million, million), arena[million : 2 * million])
    assert reader.statistics().remotes_relearned == 2
    owner.close()
    reader.close()


class _Model:
    """Random rounds of allocate, register, tell, free, resize_ and transfer."""

    def __init__(self, owner: Connection, reader: Connection, seed: int) -> None:
        self.owner, self.reader = owner, reader
        self.random = np.random.default_rng(seed)
        self.tensors: list[torch.Tensor] = []
        self.held: list[RegisteredMemory] = []

    def allocate(self) -> None:
        nbytes = int(self.random.integers(1, 1 << 14))
        self.tensors.append(
            torch.from_numpy(self.random.integers(0, 255, nbytes).astype(np.uint8)).clone()
        )

    def free(self) -> None:
        if self.tensors:
            self.tensors.pop(int(self.random.integers(len(self.tensors))))

    def resize(self) -> None:
        if self.tensors:
            tensor = self.tensors[int(self.random.integers(len(self.tensors)))]
            nbytes = int(self.random.integers(1, 1 << 14))
            tensor.resize_(nbytes)
            tensor.random_(0, 255)

    def hold(self) -> None:
        if self.tensors:
            tensor = self.tensors[int(self.random.integers(len(self.tensors)))]
            self.held.append(self.owner.register(tensor_memory(tensor)))

    def unhold(self) -> None:
        if self.held:
            self.owner.registry.release(self.held.pop())

    def transfer(self) -> None:
        if not self.tensors:
            return
        tensor = self.tensors[int(self.random.integers(len(self.tensors)))]
        start = int(self.random.integers(tensor.numel()))
        stop = int(self.random.integers(start, tensor.numel())) + 1
        view = tensor[start:stop]
        target = torch.zeros_like(view)
        exposed = self.owner.expose(Direction.READ, [tensor_memory(view)])
        self.reader.claim(exposed.offer(), [tensor_memory(target)]).wait(20)
        exposed.wait(20)
        assert torch.equal(view, target)

    def run(self, num_rounds: int) -> None:
        steps = (self.allocate, self.free, self.resize, self.hold, self.unhold, self.transfer)
        for _ in range(num_rounds):
            steps[int(self.random.integers(len(steps)))]()


def _churn(adapter_factory: Callable[[str], Adapter], num_rounds: int) -> None:
    owner = Connection(adapter_factory("owner"))
    reader = Connection(adapter_factory("reader"))
    model = _Model(owner, reader, seed=num_rounds)
    model.run(num_rounds)
    while model.held:
        model.unhold()
    model.tensors.clear()
    gc.collect()
    owner.registry.collect()
    assert owner.statistics().live_registrations == 0
    owner.close()
    reader.close()


def test_churned_memory_always_arrives_right(adapter_factory: Callable[[str], Adapter]) -> None:
    _churn(adapter_factory, 600)


@pytest.mark.soak
def test_churned_memory_always_arrives_right_10_000_rounds(
    adapter_factory: Callable[[str], Adapter],
) -> None:
    _churn(adapter_factory, 10_000)
