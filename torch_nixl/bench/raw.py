"""Bare NIXL as a rival: its bindings, called as directly as Python can."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torch_nixl.bench.session import Session
from torch_nixl.engine.nixl import load

NAME = "raw NIXL"


class RawAgent:
    """One agent with one registered buffer, which another rank reads and writes.

    It knows no shapes and no matching, and is polled by the thread that waits. Its lock mode is
    RW and NIXL's progress thread is off, as in a Connection. The first two ranks meet; further
    ones only take part in making it.
    """

    def __init__(self, session: Session, buffer: torch.Tensor) -> None:
        self._nixl = load()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_RW
        self._agent = self._nixl.nixlAgent(f"raw{session.rank}", config)
        self._agent.createBackend("UCX", {})
        self._segment = self._nixl.DRAM_SEG if buffer.is_cpu else self._nixl.VRAM_SEG
        device = 0 if buffer.is_cpu else buffer.device.index
        self._here = (buffer.data_ptr(), device)
        self._buffer = buffer
        row = (buffer.data_ptr(), buffer.nbytes, device, "")
        self._agent.registerMem(self._nixl.nixlRegDList(self._segment, [row]), [])
        self._num_waiting = 0
        ends = session.exchange((bytes(self._agent.getLocalMD()), self._here))
        if session.rank < 2:
            metadata, self._there = ends[1 - session.rank]
            self._peer = self._agent.loadRemoteMD(metadata).decode()

    def notify(self, message: bytes) -> None:
        """Send a message."""
        self._agent.genNotif(self._peer, message, [])

    def poll(self) -> None:
        """Take in what has arrived."""
        for messages in self._agent.getNotifs({}, []).values():
            self._num_waiting += len(messages)

    def await_message(self) -> None:
        """Wait for a message."""
        while not self._num_waiting:
            self.poll()
        self._num_waiting -= 1

    def prepare(self, write: bool, nbytes: int, message: bytes) -> Any:
        """Make a request to write to the other's buffer, or to read from it, and tell it so."""
        return self._agent.createXferReq(
            self._nixl.NIXL_WRITE if write else self._nixl.NIXL_READ,
            self._place(self._here, nbytes),
            self._place(self._there, nbytes),
            self._peer,
            message,
            [],
        )

    def run(self, request: Any, message: bytes) -> None:
        """Post a request and wait until it is done."""
        state = self._agent.postXferReq(request, message)
        while state == self._nixl.NIXL_IN_PROG:
            state = self._agent.getXferStatus(request)

    def move(self, write: bool, nbytes: int, message: bytes) -> None:
        """Make a request, run it and release it."""
        request = self.prepare(write, nbytes, message)
        self.run(request, message)
        self._agent.releaseXferReq(request)

    def look_up(self, places: npt.NDArray[np.uint64]) -> Any:
        """Look up offsets and sizes, ``[n, 2]``, in both sides' buffers, for `read_rows`."""
        lists = []
        for name, end in ((self._nixl.NIXL_INIT_AGENT, self._here), (self._peer, self._there)):
            rows = np.zeros((len(places), 3), np.uint64)
            rows[:, 0] = places[:, 0] + np.uint64(end[0])
            rows[:, 1] = places[:, 1]
            rows[:, 2] = end[1]
            descriptors = self._nixl.nixlXferDList(self._segment, rows)
            lists.append(self._agent.prepXferDlist(name, descriptors, []))
        return tuple(lists)

    def read_rows(self, lists: Any, ours: npt.NDArray[np.int32], theirs: Any) -> None:
        """Read rows of what was looked up into rows of ours, and wait until it is done."""
        request = self._agent.makeXferReq(
            self._nixl.NIXL_READ, lists[0], ours, lists[1], theirs, b"", [], False
        )
        self.run(request, b"")
        self._agent.releaseXferReq(request)

    def _place(self, end: tuple[int, int], nbytes: int) -> Any:
        row = np.array([[end[0], nbytes, end[1]]], dtype=np.uint64)
        return self._nixl.nixlXferDList(self._segment, row)
