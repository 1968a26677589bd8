"""PyTorch's own tests of its backends, on ranks that are there already.

They come with the wheel, in `torch.testing._internal.distributed.distributed_test`. Nothing of them
is copied here: a rank imports them, makes the group on "nixl", and calls one by its name.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import traceback
import unittest
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import torch_nixl  # noqa: F401 - makes the backend known
from torch_nixl.testing import Rank

SECONDS = 20.0
"""Timeout of the groups: a rank that waits for one that has failed ends after so long."""


@functools.cache
def _module() -> Any:
    """Import the tests. Which of them they skip depends on BACKEND in the environment."""
    os.environ.setdefault("TEMP_DIR", "/nowhere")
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    # Tables of what each backend can do.
    for feature in ("ddp", "subgroup"):
        common_distributed.DistTestCases.backend_feature[feature].add("nixl")
    return distributed_test


@functools.cache
def _case_class() -> Any:
    module = _module()

    class Case(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def _barrier(self, wait_for: int | None = None, timeout: float = 2 * SECONDS) -> None:
            # Ranks that are new import for longer than this waits by itself.
            module.Barrier.sync(wait_for, timeout)

    return Case


def names(rank: Rank) -> list[str]:
    """All tests there are."""
    return sorted(name for name in dir(_case_class()) if name.startswith("test_"))


def run(rank: Rank, name: str) -> tuple[str, str]:
    """Run one test.

    Returns:
        ``"passed"``, ``"skipped"`` or ``"failed"``; and why.
    """
    module = _module()
    os.environ["TEMP_DIR"] = str(rank.directory)
    for directory in ("barrier", "test_dir", "init_dir"):
        (rank.directory / directory).mkdir(exist_ok=True)
    module.Barrier.barrier_id = 0
    _seed()
    case = _case_class()(name)
    case.rank = rank.rank
    case.file_name = str(rank.directory / "store")
    dist.init_process_group(
        "nixl",
        init_method=f"file://{case.file_name}",
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    try:
        case._barrier()
        _call(getattr(case, name))
        case._barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
    except unittest.SkipTest as skip:
        result = "skipped", str(skip)
    except SystemExit as end:
        result = "skipped", _message(end.code)
    except BaseException:  # noqa: BLE001 - all that a test may end with
        result = "failed", traceback.format_exc()
    else:
        return "passed", ""
    if dist.is_initialized():
        # Frees the other ranks, wherever they wait.
        with contextlib.suppress(RuntimeError):  # The test may have broken it.
            dist.distributed_c10d._abort_process_group()
    return result


def _call(test: Callable[[], None]) -> None:
    """Call a test; a second time if it says that the world is too small for it.

    It means less than eight ranks, of which it uses three.
    """
    from torch.testing._internal.common_distributed import TEST_SKIPS

    try:
        test()
    except SystemExit as end:
        if end.code != TEST_SKIPS["small_worldsize"].exit_code:
            raise
        size, os.environ["WORLD_SIZE"] = os.environ["WORLD_SIZE"], "8"
        try:
            test()
        finally:
            os.environ["WORLD_SIZE"] = size


def _seed() -> None:
    """Seed as the tests' own set-up does: they compare random tensors of several ranks."""
    from torch.testing._internal.common_utils import set_rng_seed

    set_rng_seed(1234)  # type: ignore[no-untyped-call]


def _message(code: object) -> str:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    for skip in TEST_SKIPS.values():
        if skip.exit_code == code:
            return str(skip.message)
    return f"exits with {code}"
