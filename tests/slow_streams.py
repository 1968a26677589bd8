"""Kernels of a `FakeDevice` that a test holds up, or that tell what they saw."""

from __future__ import annotations

import threading

import torch

from torch_nixl.testing import FakeStream

SECONDS = 20.0
"""How long anything may take on a busy machine."""


def wait_on(event: threading.Event) -> None:
    """What a slow kernel does."""
    assert event.wait(SECONDS)


def queued(stream: FakeStream, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Queue a kernel that reads a tensor; return where it puts what it saw."""
    seen: list[torch.Tensor] = []
    stream.launch(lambda: seen.append(tensor.clone()))
    return seen
