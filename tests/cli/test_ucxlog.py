"""What the doctor reads out of UCX's log."""

from __future__ import annotations

import pytest

from cli import ucx_samples
from torch_nixl.cli.doctor import ucxlog


def test_lanes_are_those_to_the_other_process_and_not_to_oneself() -> None:
    assert ucxlog.lanes(ucx_samples.CMA) == ucxlog.Lanes("cma/memory", "cma/memory", "tcp/lo")


def test_striped_lane_names_every_device() -> None:
    lanes = ucxlog.lanes(ucx_samples.STRIPED_TCP)
    assert lanes == ucxlog.Lanes("tcp/lo", "tcp/lo tcp/eth0", "tcp/lo")
    assert ucxlog.kind(lanes.write) == "tcp"


@pytest.mark.parametrize("log", ["", "no log of UCX\n", "| one | two |\n|||\n|\n"])
def test_unknown_text_has_nothing_to_say(log: str) -> None:
    assert ucxlog.lanes(log) == ucxlog.Lanes(None, None, None)
    assert ucxlog.version(log) is None
    assert ucxlog.devices(log) == ()
    assert ucxlog.complaints(log) == ()


def test_version_is_read() -> None:
    assert ucxlog.version(ucx_samples.CMA) == "1.23.0"


def test_devices_are_listed_once() -> None:
    found = [(device.transport, device.device) for device in ucxlog.devices(ucx_samples.DEVICES)]
    assert found == [("self", "memory"), ("rc_mlx5", "mlx5_0:1")]


def test_complaints_are_listed_once_and_typos_are_kept() -> None:
    found = ucxlog.complaints(ucx_samples.COMPLAINTS, frozenset({"UCX_TCP_SNDBUF"}))
    assert found == (
        "transport 'bogus' is not available",
        "unused environment variables: UCX_TCP_SNDBUF (maybe: UCX_TCP_CM_SNDBUF?); UCX_TYPO",
        "no usable transports/devices",
    )


def test_unused_variables_that_we_set_are_no_complaint() -> None:
    tuned = frozenset({"UCX_TCP_SNDBUF", "UCX_TYPO"})
    found = ucxlog.complaints(ucx_samples.COMPLAINTS, tuned)
    assert not [text for text in found if "unused" in text]


@pytest.mark.parametrize(
    ("lane", "kind"),
    [
        ("cma/memory", "cma"),
        ("tcp/eth0", "tcp"),
        ("rc_mlx5/mlx5_0:1", "rdma"),
        ("dc_mlx5/mlx5_0:1 dc_mlx5/mlx5_1:1", "rdma"),
        ("ud_verbs/mlx5_0:1", "rdma"),
        ("srd/rdmap0:1", "rdma"),
        ("posix/memory", "shared memory"),
        ("cuda_ipc/cuda", "unknown"),
        (None, "unknown"),
    ],
)
def test_kind_of_lane(lane: str | None, kind: str) -> None:
    assert ucxlog.kind(lane) == kind
