"""The list of all conformance checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_nixl._testing import fault_checks, memory_checks, transfer_checks
from torch_nixl._testing.harness import Harness


@dataclass(frozen=True, slots=True)
class Check:
    """One behaviour that every adapter must show.

    Attributes:
        name: What it says of the adapter, in words joined by underscores.
        run: Asserts it. Takes a fresh harness; raises AssertionError where the adapter differs.
        needs_peer: Whether it uses `Harness.peer`, so a process where peers are processes.
    """

    name: str
    run: Callable[[Harness], None]
    needs_peer: bool


def conformance_checks() -> tuple[Check, ...]:
    """Return every check, in the order in which they are best read.

    Example::

        @pytest.mark.parametrize("check", conformance_checks(), ids=lambda check: check.name)
        def test_my_adapter(check):
            check.run(MyHarness())
    """
    return tuple(
        Check(run.__name__.removeprefix("check_"), run, module is fault_checks)
        for module in (memory_checks, transfer_checks, fault_checks)
        for run in module.CHECKS
    )
