"""Puts the doctor's report together."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch_nixl.cli.doctor.advice import advise
from torch_nixl.cli.doctor.host import installed_version, read_host, read_versions
from torch_nixl.cli.doctor.messages import Message
from torch_nixl.cli.doctor.report import Backend, CmaTrial, Path, Report, Setting, UcxDevice
from torch_nixl.engine.nixl import tuned_environment

WORKER_TIMEOUT_S = 150.0
"""Seconds for all trials together. A healthy machine needs about five."""


@dataclass(slots=True)
class Trials:
    """What the worker found, as far as it got."""

    cma: CmaTrial | None = None
    path: Path | None = None
    nixl_failure: str | None = None
    nixl_wheel: str | None = None
    ucx_version: str | None = None
    ucx_complaints: tuple[str, ...] = ()
    backends: tuple[Backend, ...] = ()
    devices: tuple[UcxDevice, ...] = ()
    streams: tuple[str, ...] = ()

    def take(self, message: Message) -> str:
        """Add what one trial found; returns what comes next, in a few words."""
        if message.cma is not None:
            self.cma = message.cma
            return "importing NIXL"
        self.nixl_failure = message.nixl_failure or self.nixl_failure
        self.nixl_wheel = message.nixl_wheel or self.nixl_wheel
        self.ucx_version = message.ucx_version or self.ucx_version
        self.ucx_complaints += message.ucx_complaints or ()
        self.devices += message.devices or ()
        self.path = message.path or self.path
        self.streams += message.streams or ()
        if message.backend is not None:
            self.backends += (message.backend,)
            return f"tried the {message.backend.name} backend"
        return "trying backends"


def examine(announce: Callable[[str], None] = lambda _: None) -> Report:
    """Look at this machine. Never raises for what is wrong with it.

    Args:
        announce: Called with a few words before each step.
    """
    announce("reading the system")
    host = read_host()
    versions = read_versions()
    settings = tuple(
        Setting(name=name, value=value, source=source)
        for name, value, source in tuned_environment()
    )
    announce("trying cross memory attach")
    trials = run_trials(announce)
    wheel = trials.nixl_wheel
    if wheel is not None:
        wheel = f"{wheel} {installed_version(wheel) or '(unknown version)'}"
    versions = versions.model_copy(update={"nixl_wheel": wheel, "ucx": trials.ucx_version})
    cma = trials.cma or CmaTrial(works=False, error="not tried")
    path = trials.path or Path(works=False, failure=trials.nixl_failure)
    findings = advise(
        host=host,
        cma=cma,
        backends=trials.backends,
        devices=trials.devices,
        path=path,
        nixl_failure=trials.nixl_failure,
        ucx_complaints=trials.ucx_complaints,
        environment=os.environ,
    )
    return Report(
        can_move=path.works,
        versions=versions,
        host=host,
        cma=cma,
        backends=trials.backends,
        ucx_devices=trials.devices,
        path=path,
        streams=trials.streams,
        environment=settings,
        findings=findings,
    )


def run_trials(announce: Callable[[str], None], timeout: float = WORKER_TIMEOUT_S) -> Trials:
    """Run the worker process, and return what it found before it ended.

    Args:
        announce: Called with a few words before each step.
        timeout: Seconds for all trials; the worker is killed then.
    """
    trials = Trials()
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as output:
        # A session of its own, so that its children can be killed with it.
        process = subprocess.Popen(
            [sys.executable, "-m", "torch_nixl.cli.doctor.worker", str(writer)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[writer],
            start_new_session=True,
        )
        os.close(writer)
        deadline = time.monotonic() + timeout
        try:
            for message in _read_messages(reader, deadline):
                announce(trials.take(message))
        finally:
            os.close(reader)
            # It has ended, or its time has passed.
            in_time = time.monotonic() < deadline
            status = _end(process)
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
    if trials.path is None and trials.nixl_failure is None:
        said = f": {lines[-1]}" if lines else ""
        if not in_time:
            reason = f"not done within {timeout:g} s"
        elif status < 0:
            reason = f"killed by {signal.Signals(-status).name}"
        else:
            reason = f"status {status}"
        when = "trying its backends" if trials.nixl_wheel else "importing NIXL"
        trials.nixl_failure = f"a process ended while {when} ({reason}{said})"
    return trials


def _read_messages(descriptor: int, deadline: float) -> Iterator[Message]:
    """Yield what the worker says, until it ends or the deadline passes."""
    received = b""
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([descriptor], [], [], left)
        piece = os.read(descriptor, 1 << 16) if ready else b""
        if not piece:
            return
        *lines, received = (received + piece).split(b"\n")
        for line in lines:
            yield Message.model_validate_json(line)


def _end(process: subprocess.Popen[bytes]) -> int:
    """Wait for the worker, or kill it and all its children. Returns its exit status."""
    try:
        return process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()
