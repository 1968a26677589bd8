"""Lets two processes of this host move bytes as two ranks would."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from functools import partial
from pathlib import Path as FilePath

from torch_nixl.cli.doctor import ucxlog
from torch_nixl.cli.doctor.channel import Channel
from torch_nixl.cli.doctor.children import Json, first_failure, run_together
from torch_nixl.cli.doctor.exchange import initiate, meet, serve
from torch_nixl.cli.doctor.report import Path

SPOKEN = {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y"}
"""Environment variables with which UCX says what it does."""


def try_pair(timeout: float) -> tuple[Path, str]:
    """Let two children move bytes both ways.

    Args:
        timeout: Seconds for everything.

    Returns:
        What was found, and what UCX and NIXL said on both sides.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryDirectory() as folder:
        logs = [FilePath(folder, name) for name in ("initiator", "target")]
        tasks = [
            partial(_run, serves, end, log, timeout)
            for serves, end, log in zip((False, True), (ours, theirs), logs, strict=True)
        ]
        outcomes = run_together(tasks, timeout)
        texts = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
    measured = outcomes[0].value
    path = describe(texts[0], measured if isinstance(measured, dict) else {})
    failure = first_failure(outcomes)
    path = path.model_copy(update={"works": failure is None, "failure": failure})
    return path, "\n".join([*texts, *(outcome.output for outcome in outcomes)])


def describe(log: str, measured: dict[str, Json]) -> Path:
    """Return the path that a log tells of, with what was measured on it."""
    lanes = ucxlog.lanes(log)
    found: dict[str, Json] = {
        "works": True,
        "kind": ucxlog.kind(lanes.read or lanes.write),
        "read_lane": lanes.read,
        "write_lane": lanes.write,
        "control_lane": lanes.control,
    }
    return Path.model_validate(found | measured)


def _run(serves: bool, connection: socket.socket, log: FilePath, timeout: float) -> Json:
    os.environ.update(SPOKEN, UCX_LOG_FILE=str(log))
    end = meet(Channel(connection, time.monotonic() + timeout, serves=serves))
    try:
        if serves:
            serve(end)
            return None
        return initiate(end)
    finally:
        end.adapter.close()
