"""The test's side of `dynamo_peer.py`: start it, ask it, kill it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("dynamo_peer.py")
START_TIMEOUT = 90.0
CALL_TIMEOUT = 20.0
# What a reply may take on top of the deadline that the peer keeps itself.
GRACE = 5.0


class PeerError(Exception):
    """A request ended with an exception in the peer.

    Attributes:
        type: Name of the exception's class.
        bases: Names of that class's bases, nearest first.
    """

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(f"{error['type']}: {error['message']}")
        self.type: str = error["type"]
        self.bases: list[str] = error["bases"]


class PeerGone(Exception):
    """The peer ended, or did not answer in time and was killed."""


class Peer:
    """A running peer process. Usable from any thread; `close` is idempotent.

    Args:
        python: Interpreter that has ``module``.
        module: The library under test.
        env: Added to this process's environment.
        lifetime: Seconds after which the peer kills itself.
        worker_id: Of its Connector; made up if empty.
    """

    def __init__(
        self,
        python: str,
        module: str,
        *,
        env: Mapping[str, str] | None = None,
        lifetime: int = 300,
        worker_id: str = "",
    ) -> None:
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        environment = {**os.environ, "NIXL_LOG_LEVEL": "ERROR", **(env or {})}
        arguments = [python, str(SCRIPT), "--module", module, "--lifetime", str(lifetime)]
        if worker_id:
            arguments += ["--worker-id", worker_id]
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )
        self._reader = threading.Thread(target=self._read, name="interop-peer", daemon=True)
        self._reader.start()
        self.call("hello", timeout=START_TIMEOUT)

    @property
    def pid(self) -> int:
        return self._process.pid

    def stderr(self) -> str:
        """Return the end of what the peer wrote to stderr."""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 4000))
        return self._errors.read().decode(errors="replace")

    def start(
        self, command: str, *, timeout: float = CALL_TIMEOUT, **arguments: Any
    ) -> Future[dict[str, Any]]:
        """Send a request and return at once; the future holds its result or `PeerError`."""
        future: Future[dict[str, Any]] = Future()
        number = next(self._numbers)
        request = {"id": number, "command": command, "deadline": timeout, **arguments}
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            self._pending[number] = future
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(line)
                self._process.stdin.flush()
            except (OSError, ValueError) as error:
                self._pending.pop(number, None)
                raise PeerGone(f"peer takes no requests: {self.stderr()}") from error
        return future

    def call(
        self, command: str, *, timeout: float = CALL_TIMEOUT, **arguments: Any
    ) -> dict[str, Any]:
        """Send a request and wait for its result.

        Raises:
            PeerError: The request failed in the peer.
            PeerGone: The peer ended, or gave no answer; it is killed then.
        """
        future = self.start(command, timeout=timeout, **arguments)
        try:
            return future.result(timeout + GRACE)
        except FutureTimeout:
            self.kill()
            raise PeerGone(f"no answer to {command!r}: {self.stderr()}") from None

    async def ask(
        self, command: str, *, timeout: float = CALL_TIMEOUT, **arguments: Any
    ) -> dict[str, Any]:
        """Do what `call` does, without blocking the event loop."""
        return await asyncio.to_thread(self.call, command, timeout=timeout, **arguments)

    def stop(self) -> None:
        """Freeze the peer (SIGSTOP) until `resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the peer at once (SIGKILL)."""
        self._process.kill()
        self._process.wait(10)

    def close(self) -> None:
        """End the peer in the orderly way if it can, and free what it used."""
        if self._errors.closed:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # It has died, or was asked to before.
            self._process.stdin.write(b'{"command": "exit"}\n')
            self._process.stdin.flush()
        with contextlib.suppress(OSError):  # The same, of what was not flushed.
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join(10)
        self._process.stdout.close()
        self._errors.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            reply = json.loads(line)
            with self._lock:
                future = self._pending.pop(reply["id"], None)
            if future is None:
                continue
            if "error" in reply:
                future.set_exception(PeerError(reply["error"]))
            else:
                future.set_result(reply["result"])
        with self._lock:
            orphans = list(self._pending.values())
            self._pending.clear()
        for future in orphans:
            future.set_exception(PeerGone("peer ended before it answered"))
