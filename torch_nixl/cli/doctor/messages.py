"""What the worker process tells the doctor, one line of JSON for each trial."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from torch_nixl.cli.doctor.report import (
    Backend,
    CmaTrial,
    GpuTrial,
    Host,
    Path,
    UcxDevice,
    UcxModule,
)


class Message(BaseModel):
    """What one trial found; the fields of other trials are None."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: Host | None = None
    host_failure: str | None = None
    """Why the system can't be read."""
    cma: CmaTrial | None = None
    nixl_failure: str | None = None
    """Why NIXL can't be imported."""
    nixl_wheel: str | None = None
    """Name of the wheel that was loaded, such as ``nixl-cu13``."""
    backend: Backend | None = None
    devices: tuple[UcxDevice, ...] | None = None
    modules: tuple[UcxModule, ...] | None = None
    gpus: GpuTrial | None = None
    path: Path | None = None
    ucx_version: str | None = None
    ucx_complaints: tuple[str, ...] | None = None
    """Warnings and errors that UCX logged while the path was tried."""
    streams: tuple[str, ...] | None = None
    """For each device, whether its streams can wait for transfers."""
