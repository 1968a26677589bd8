"""Puts the doctor's report together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch_nixl.cli.doctor.advice import advise
from torch_nixl.cli.doctor.host import installed_version, read_versions
from torch_nixl.cli.doctor.messages import Message
from torch_nixl.cli.doctor.programs import run_program
from torch_nixl.cli.doctor.report import (
    Backend,
    CmaTrial,
    GpuTrial,
    Host,
    Path,
    Report,
    Setting,
    UcxDevice,
    UcxModule,
)
from torch_nixl.engine.nixl import tuned_environment

WORKER_TIMEOUT_S = 180.0
"""Seconds for all trials together. A healthy machine needs about five."""

_PREFIXES = ("UCX_", "NIXL_", "TORCH_NIXL_", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SECRETS = ("SECRET", "KEY", "TOKEN", "PASSWORD")


@dataclass(slots=True)
class Trials:
    """What the worker found, as far as it got."""

    host: Host | None = None
    host_failure: str | None = None
    cma: CmaTrial | None = None
    path: Path | None = None
    nixl_failure: str | None = None
    nixl_wheel: str | None = None
    ucx_version: str | None = None
    ucx_complaints: tuple[str, ...] = ()
    backends: tuple[Backend, ...] = ()
    devices: tuple[UcxDevice, ...] = ()
    streams: tuple[str, ...] = ()
    modules: tuple[UcxModule, ...] = ()
    gpus: GpuTrial | None = None

    def take(self, message: Message) -> str:
        """Add what one trial found; returns what comes next, in a few words."""
        if message.host is not None or message.host_failure is not None:
            self.host, self.host_failure = message.host, message.host_failure
            return "trying cross memory attach"
        if message.cma is not None:
            self.cma = message.cma
            return "importing NIXL"
        self.nixl_failure = message.nixl_failure or self.nixl_failure
        self.nixl_wheel = message.nixl_wheel or self.nixl_wheel
        self.ucx_version = message.ucx_version or self.ucx_version
        self.ucx_complaints += message.ucx_complaints or ()
        self.devices += message.devices or ()
        self.modules += message.modules or ()
        self.gpus = message.gpus or self.gpus
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
    versions = read_versions()
    trials = run_trials(announce)
    host = trials.host or _unread_host()
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
        modules=trials.modules,
        torch_gpus=trials.gpus,
        streams=trials.streams,
        versions=versions,
        path=path,
        host_failure=trials.host_failure,
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
        ucx_modules=trials.modules,
        torch_gpus=trials.gpus,
        path=path,
        streams=trials.streams,
        environment=settings_of(os.environ),
        findings=findings,
    )


def run_trials(announce: Callable[[str], None], timeout: float = WORKER_TIMEOUT_S) -> Trials:
    """Run the worker process, and return what it found before it ended.

    Args:
        announce: Called with a few words before each step.
        timeout: Seconds for all trials; the worker is killed then.
    """
    trials = Trials()

    def hear(line: bytes) -> None:
        announce(trials.take(Message.model_validate_json(line)))

    ended = run_program("torch_nixl.cli.doctor.worker", hear, timeout)
    if trials.path is None and trials.nixl_failure is None:
        when = "trying its backends" if trials.nixl_wheel else "importing NIXL"
        trials.nixl_failure = f"a process ended while {when} ({ended.why(timeout)})"
    return trials


def settings_of(environment: Mapping[str, str]) -> tuple[Setting, ...]:
    """Return the variables that count here: those that torch_nixl tunes, and the user's own."""
    found = [
        Setting(name=name, value=value, source=source)
        for name, value, source in tuned_environment()
    ]
    known = {setting.name for setting in found}
    for name, value in sorted(environment.items()):
        secret = any(word in name for word in _SECRETS)
        if name.startswith(_PREFIXES) and name not in known and not secret:
            found.append(Setting(name=name, value=value, source="user"))
    return tuple(found)


def _unread_host() -> Host:
    """Return what is known of a host that can't be read."""
    return Host(
        interfaces=(),
        rdma_devices=(),
        shm_bytes=None,
        memlock_bytes=None,
        home=os.environ.get("HOME"),
        home_readable=True,
        num_cores=len(os.sched_getaffinity(0)),
        load=0.0,
        uid=os.getuid(),
        cap_sys_ptrace=False,
        no_new_privs=False,
        seccomp_mode=None,
        yama_ptrace_scope=None,
    )
