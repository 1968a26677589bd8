"""What `dying` starts: a server that forks the processes of rounds, and what each of them does."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from typing import Any

from connect.dying import HANG_SECONDS, WAIT_SECONDS, Round

WATCH_SECONDS = 0.1
"""How long the survivor looks whether memory that is its own again stays as it is."""

FOREIGN_SECONDS = 0.5
"""For how long memory stays owned that nobody came for: see the engine's `passive`."""

_SAY_FD = 3


def _serve(control: socket.socket) -> tuple[str, Round] | None:
    """Fork whatever is asked for; return, in each process that is forked, what it is to be."""
    importlib.import_module("torch_nixl.connect")
    importlib.import_module("torch_nixl.engine.nixl").load()
    gc.collect()
    gc.freeze()  # What the processes' ends would else go through, page by copied page.
    while True:
        message, fds, _flags, _address = socket.recv_fds(control, 1 << 16, 4)
        if not message:
            return None
        question = json.loads(message)
        if "reap" in question:
            pid, status = os.waitpid(question["reap"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            control.send(json.dumps(answer).encode())
            continue
        pid = os.fork()
        if not pid:
            control.close()
            # Through copies out of their way: the numbers that they get may be taken by another.
            copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in fds]
            for number, (fd, copied) in enumerate(zip(fds, copies, strict=True)):
                os.close(fd)
                os.dup2(copied, number)
                os.close(copied)
            return question["role"], Round(**question["round"])
        for fd in fds:
            os.close(fd)
        control.send(json.dumps(pid).encode())


def _say(text: str) -> None:
    os.write(_SAY_FD, f"{text}\n".encode())


def _act(one: Round, connector: Any) -> None:
    """Do what the victim does. Returns only after a stop, a close or an abort."""
    until = time.monotonic() + one.delay
    while time.monotonic() < until:
        time.sleep(0.0002)
    _say("acting")
    match one.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "close" | "abort":
            getattr(connector, one.action)()
            _say("acted")
        case "exit":
            sys.exit(0)
        case "raise":
            raise ValueError("mine")
        case "_exit":
            os._exit(0)


def _be(role: str, one: Round) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    if one.transports:
        os.environ["UCX_TLS"] = one.transports
    import torch

    from torch_nixl import connect
    from torch_nixl.engine import passive
    from torch_nixl.errors import TorchNixlError

    passive.FOREIGN_SECONDS = FOREIGN_SECONDS
    connector = connect.Connector(role)
    connection = connector.connection()
    if one.met:
        _meet(role, connection)
    # Filled, so that every page is there.
    memory = torch.full((one.nbytes,), 1 if role == "owner" else 2, dtype=torch.uint8)
    operation: Any = None
    is_victim, error = role == one.victim, ""
    if role == "owner":
        exposing = connect.ReadableOperation if one.reads else connect.WritableOperation
        operation = exposing(connection, connect.Descriptor(memory))
        _say(operation.metadata().model_dump_json())
    else:
        _say("up")
    if is_victim and one.moment == "before":
        sys.stdin.readline()
        _act(one, connector)
    try:
        if role == "active":
            told = connect.RdmaMetadata.model_validate_json(sys.stdin.readline())
            if one.reads:
                operation = connect.ReadOperation(connection, told, connect.Descriptor(memory))
            else:
                operation = connect.WriteOperation(connection, connect.Descriptor(memory), told)
        if is_victim and one.moment != "before":
            sys.stdin.readline()
            _reach(one.moment, operation)
            _act(one, connector)
        if one.cancels and not is_victim:
            _reach("middle", operation, 2.0)
            operation.cancel(timeout=WAIT_SECONDS)
        # Nobody may have come to an owner, and then nobody will.
        operation.wait(WAIT_SECONDS if role == "active" or one.action == "stop" else 3.0)
    except TorchNixlError as caught:
        error = f"{type(caught).__name__} "
    if is_victim and one.action in ("close", "abort"):
        return
    if operation is not None and not operation.wait_released(WAIT_SECONDS):
        _say(f"{error}its memory is still another's")
        return
    operation = None
    if one.frees:
        del memory
        gc.collect()
        time.sleep(WATCH_SECONDS)
    else:
        memory.fill_(7)
        time.sleep(WATCH_SECONDS)
        if not bool((memory == 7).all()):
            _say(f"{error}its memory was written to")
            return
    _say(error + ("went on" if _works(connection) else "moved wrong bytes"))


def _meet(role: str, connection: Any) -> None:
    """Have the active side read from the owner."""
    import torch

    from torch_nixl import connect

    memory = connect.Descriptor(torch.zeros(1))
    if role == "owner":
        with connect.ReadableOperation(connection, memory) as exposed:
            _say(exposed.metadata().model_dump_json())
            exposed.wait(WAIT_SECONDS)
    else:
        told = connect.RdmaMetadata.model_validate_json(sys.stdin.readline())
        connect.ReadOperation(connection, told, memory).wait(WAIT_SECONDS)


def _reach(moment: str, operation: Any, seconds: float = WAIT_SECONDS) -> None:
    """Return at the moment to act, or once so many seconds have passed."""
    from torch_nixl.connect import OperationStatus
    from torch_nixl.errors import TorchNixlError

    if moment == "after":
        with contextlib.suppress(TorchNixlError):  # The other side may have cancelled.
            operation.wait(seconds)
    elif moment == "middle":
        engine = operation._operation
        until = time.monotonic() + seconds
        while not engine.done and time.monotonic() < until:
            begun = operation.status is not OperationStatus.INITIALIZED
            if engine.in_flight if hasattr(operation, "remote") else begun:
                break
            time.sleep(0.0002)


def _works(connection: Any) -> bool:
    """Whether others can still read from this process, as they have to."""
    import torch

    from torch_nixl import connect

    source, target = torch.full((4096,), 3, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    with connect.Connector("healthy") as other:
        exposed = connect.ReadableOperation(connection, connect.Descriptor(source))
        reading = connect.ReadOperation(
            other.connection(), exposed.metadata(), connect.Descriptor(target)
        )
        reading.wait(WAIT_SECONDS)
        exposed.wait(WAIT_SECONDS)
    return bool((target == 3).all())


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as control:
        started = _serve(control)
    if started is not None:
        _be(*started)
