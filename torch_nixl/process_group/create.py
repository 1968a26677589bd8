"""Makes a group when `torch.distributed` asks for one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch

from torch_nixl.process_group.group import NixlProcessGroup
from torch_nixl.process_group.others import Other, make_other
from torch_nixl.process_group.registration import DEVICES, NAME

_HELPER = "_new_process_group_helper"


def create(options: Any) -> NixlProcessGroup:
    """Make the group that c10d is making.

    It takes the place of c10d's own, which could hold a backend for each kind of device: so where
    the caller named another backend for some, that one becomes part of this group.

    Args:
        options: c10d's `_DistributedBackendOptions`.

    Raises:
        ValueError: The other backend can't be had beside this one.
        BackendError: NIXL is missing or can't be set up.
    """
    frame = _helper_frame()
    backends = _backend_of_each_device(frame)
    own = [device for device, name in backends.items() if name == NAME]
    others: dict[str, Other] = {}
    by_name: dict[str, Other] = {}
    for device, name in backends.items():
        if name == NAME:
            continue
        if name not in by_name:
            by_name[name] = _made_already(frame, device) or make_other(
                name,
                device,
                options.store,
                options.group_rank,
                options.group_size,
                options.timeout,
            )
        others[device] = by_name[name]
    return NixlProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        timeout=options.timeout,
        devices=own,
        others=others,
        once=bool(options.global_ranks_in_group),
    )


def _helper_frame() -> FrameType | None:
    """The frame of the caller in c10d, which knows of the other devices: the options don't."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != _HELPER:
        frame = frame.f_back
    return frame


def _backend_of_each_device(frame: FrameType | None) -> Mapping[str, str]:
    config = None if frame is None else frame.f_locals.get("backend_config")
    if config is None:
        return dict.fromkeys(DEVICES, NAME)
    return {device: str(name) for device, name in config.get_device_backend_map().items()}


def _made_already(frame: FrameType | None, device: str) -> Other | None:
    """The backend that c10d made for a device which comes before ours in the caller's string."""
    half_made = None if frame is None else frame.f_locals.get("pg")
    try:
        return None if half_made is None else half_made._get_backend(torch.device(device))
    except RuntimeError:
        return None
