"""Asks torch for its GPUs, in a child: a driver that is broken may hang or crash whoever asks."""

from __future__ import annotations

from torch_nixl.cli.doctor.children import Json, run_together
from torch_nixl.cli.doctor.report import GpuTrial, TorchGpu


def try_gpus(timeout: float) -> GpuTrial:
    """Let a child list the GPUs that torch can use.

    Args:
        timeout: Seconds.
    """
    [outcome] = run_together([_ask], timeout)
    if outcome.failure is not None:
        return GpuTrial(failure=outcome.failure)
    return GpuTrial.model_validate(outcome.value)


def try_streams(timeout: float) -> tuple[str, ...]:
    """Let a child say for each device whether its streams can wait for transfers.

    Args:
        timeout: Seconds.
    """
    [outcome] = run_together([_ask_streams], timeout)
    lines = outcome.value if isinstance(outcome.value, list) else [f"devices: {outcome.failure}"]
    return tuple(map(str, lines))


def _ask_streams() -> Json:
    # Imports torch, which takes seconds.
    from torch_nixl.engine.device_streams import describe_devices

    return list(describe_devices())


def _ask() -> Json:
    import torch

    if not torch.cuda.is_available():
        # The reason is in the error that the first use raises.
        try:
            torch.empty(1, device="cuda")
        except (AssertionError, RuntimeError) as error:
            reason = str(error).strip().splitlines()
            return {"failure": reason[0] if reason else type(error).__name__}
        return {"failure": "torch finds no GPU"}
    found: list[Json] = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        gpu = TorchGpu(name=facts.name, pci=_pci(facts), memory_bytes=facts.total_memory)
        found.append(gpu.model_dump(mode="json"))
    return {"devices": found}


def _pci(facts: object) -> str | None:
    """Return a GPU's address on the PCI bus, if this torch knows it."""
    numbers = [getattr(facts, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    known = [number for number in numbers if isinstance(number, int)]
    return "{:04x}:{:02x}:{:02x}.0".format(*known) if len(known) == 3 else None
