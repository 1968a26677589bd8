"""What one rank on one host runs: ``program.py SCENARIO DIRECTORY``, by torchrun.

The directory is shared by all hosts and the test: files in it say how far each has come.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torch_nixl

RANK = int(os.environ["RANK"])
SIZES = {"small": 5, "a MiB": 1 << 18, "64 MiB": 1 << 24}
"""Elements of float32."""
TIMEOUT = 4.0


def filled(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) % 1021 + 2000 * rank


def swap(communicator: torch_nixl.Communicator) -> dict[str, str]:
    """Exchange tensors of all sizes with the other rank, both at once; return their routes."""
    other = 1 - RANK
    routes = {}
    for name, count in SIZES.items():
        work = communicator.isend(filled(RANK, count), other, tag=1)
        receive = communicator.irecv(other, tag=1)
        received = receive.result()
        assert received is not None
        assert torch.equal(received, filled(other, count)), name
        work.wait()
        how = receive.statistics()
        routes[name] = f"{how.route} {how.path}".strip()
    for rows, columns, count in ((300, 7, 1), (64, 100_000, 60_000)):
        source = torch.zeros(rows, columns)
        target = torch.full((rows, columns), -1.0)
        source[:, 1 : 1 + count] = filled(RANK, rows * count).view(rows, count)
        work = communicator.isend(source[:, 1 : 1 + count], other, tag=2)
        communicator.recv(other, out=target[:, 1 : 1 + count], tag=2)
        work.wait()
        expected = torch.full((rows, columns), -1.0)
        expected[:, 1 : 1 + count] = filled(other, rows * count).view(rows, count)
        assert torch.equal(target, expected), (rows, columns)
    tree = {"layers": [filled(RANK, 5), filled(RANK, 1 << 18)], "step": RANK, "name": None}
    sent = communicator.isend_tree(tree, other, tag=3)
    got = communicator.recv_tree(other, tag=3)
    sent.wait()
    assert (got["step"], got["name"]) == (other, None)
    for one, count in zip(got["layers"], (5, 1 << 18), strict=True):
        assert torch.equal(one, filled(other, count))
    return routes


def stream(communicator: torch_nixl.Communicator, flowing: Path) -> tuple[str, Any, float]:
    """Rank 0 sends to rank 1 until that fails; return the error, its rank, seconds of the call."""
    tensor = torch.ones(SIZES["64 MiB"])
    turn = 0
    while True:
        started = time.monotonic()
        try:
            if RANK == 0:
                communicator.send(tensor, 1, timeout=TIMEOUT)
            else:
                communicator.recv(0, out=tensor, timeout=TIMEOUT)
        except torch_nixl.TransferError as error:
            return type(error).__name__, getattr(error, "rank", None), time.monotonic() - started
        turn += 1
        if turn == 3:
            flowing.touch()


def cut(directory: Path) -> dict[str, Any]:
    """Traffic; then the link is cut in mid-transfer; once it is whole, a second session."""
    communicator = torch_nixl.init(timeout=30.0)
    routes = swap(communicator)
    found = stream(communicator, directory / f"{RANK}.flowing")
    started = time.monotonic()
    communicator.close(timeout=1.0)
    closing = time.monotonic() - started
    (directory / f"{RANK}.ended").touch()
    await_file(directory / "restored")
    again = swap(torch_nixl.init(timeout=30.0))
    torch_nixl.shutdown()
    return {"routes": routes, "error": found, "closing": closing, "again": again}


def killed(directory: Path) -> dict[str, Any]:
    """The first or the last host is killed in mid-transfer, while others wait in several ways."""
    communicator = torch_nixl.init(timeout=30.0)
    victim = json.loads((directory / "victim").read_text())
    other = 1 - RANK
    waits: dict[str, torch_nixl.Work] = {}
    found = {}
    if RANK in (0, 1):
        waits["irecv"] = communicator.irecv(other, tag=8)
        waits["isend"] = communicator.isend(torch.zeros(SIZES["a MiB"]), other, tag=9)
        found["stream"] = stream(communicator, directory / f"{RANK}.flowing")[:2]
    assert victim != RANK
    await_file(directory / "killed")
    since = (directory / "killed").stat().st_mtime
    if RANK in (0, 1):
        for name, work in waits.items():
            found[name] = name_of(work.wait)
        found["recv"] = name_of(lambda: communicator.recv(other))
        found["send"] = name_of(lambda: communicator.send(torch.tensor(1), other))
    took = time.time() - since
    survivors = [rank for rank in range(communicator.world_size) if rank != victim]
    if len(survivors) > 1:
        after = survivors[survivors.index(RANK) - 1]
        work = communicator.isend(filled(RANK, SIZES["64 MiB"]), after, tag=4)
        before = survivors[(survivors.index(RANK) + 1) % len(survivors)]
        assert torch.equal(communicator.recv(before, tag=4), filled(before, SIZES["64 MiB"]))
        work.wait()
    started = time.monotonic()
    torch_nixl.shutdown()
    return {"found": found, "took": took, "closing": time.monotonic() - started}


def name_of(call: Callable[[], object]) -> tuple[str, Any]:
    try:
        call()
    except torch_nixl.TransferError as error:
        return type(error).__name__, getattr(error, "rank", None)
    return "no error", None


def interfaces(directory: Path) -> dict[str, Any]:
    """Exchange over whatever is chosen, then over what the user chooses."""
    routes = {}
    for name in ("", "front", "back"):
        if name:
            os.environ["UCX_NET_DEVICES"] = name
        communicator = torch_nixl.init(timeout=20.0)
        await_file(directory / f"go-{name}")
        routes[name] = swap(communicator)
        torch_nixl.shutdown()
        (directory / f"{RANK}.done-{name}").touch()
    return routes


def ambiguous(directory: Path) -> dict[str, Any]:
    """Try with an interface too many, then without it, by name and by exclusion."""
    communicator = torch_nixl.init(timeout=TIMEOUT)
    try:
        work = communicator.irecv(1 - RANK, tag=5)
        communicator.send(torch.tensor(1), 1 - RANK)
        work.wait()
        found = "no error"
    except torch_nixl.TransferError as error:
        found = f"{type(error).__name__}: {error}"
    (directory / f"{RANK}.found").touch()
    await_file(directory / f"{1 - RANK}.found")
    communicator.close(timeout=1.0)
    routes = {}
    for choice in ("front", "^astray"):
        os.environ["UCX_NET_DEVICES"] = choice
        with torch_nixl.init(timeout=20.0) as communicator:
            routes[choice] = swap(communicator)
    return {"found": found, "routes": routes}


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} never came"
        time.sleep(0.01)


def main() -> None:
    scenario, directory = globals()[sys.argv[1]], Path(sys.argv[2])
    try:
        result = scenario(directory)
    except BaseException:
        (directory / f"{RANK}.failed").write_text(traceback.format_exc())
        raise
    draft = directory / f"{RANK}.draft"
    draft.write_text(json.dumps(result))
    draft.rename(directory / f"{RANK}.json")


if __name__ == "__main__":
    main()
