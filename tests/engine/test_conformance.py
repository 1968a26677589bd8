"""Both adapters pass the same checks."""

from __future__ import annotations

import pytest

from torch_nixl.testing import Check, LoopbackHarness, conformance_checks, nixl_harness

CHECKS = pytest.mark.parametrize("check", conformance_checks(), ids=lambda check: check.name)


@CHECKS
@pytest.mark.timeout(30)
def test_loopback_inline(check: Check) -> None:
    check.run(LoopbackHarness(mode="inline"))


@CHECKS
@pytest.mark.timeout(30)
def test_loopback_tcp(check: Check) -> None:
    check.run(LoopbackHarness(mode="tcp"))


@CHECKS
@pytest.mark.timeout(60)
def test_nixl(check: Check) -> None:
    with nixl_harness() as harness:
        check.run(harness)


@pytest.mark.parametrize(
    "check",
    [check for check in conformance_checks() if not check.needs_peer],
    ids=lambda check: check.name,
)
@pytest.mark.timeout(60)
def test_nixl_over_tcp(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with nixl_harness() as harness:
        check.run(harness)
