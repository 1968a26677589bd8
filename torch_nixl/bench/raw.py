"""Bare NIXL as a rival: its bindings, called as directly as Python can."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torch_nixl.bench.session import Session
from torch_nixl.engine.nixl import load

NAME = "raw NIXL"


class RawAgent:
    """One agent with one registered buffer, which another rank reads and writes.

    It knows no shapes and no matching, and is polled by the thread that waits.
    """

    def __init__(self, session: Session, buffer: torch.Tensor) -> None:
        self._nixl = load()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_RW
        self._agent = self._nixl.nixlAgent(f"raw{session.rank}", config)
        self._agent.createBackend("UCX", {})
        self._segment = self._nixl.DRAM_SEG if buffer.is_cpu else self._nixl.VRAM_SEG
        self._device = 0 if buffer.is_cpu else buffer.device.index
        self._address = buffer.data_ptr()
        row = (self._address, buffer.nbytes, self._device, "")
        self._agent.registerMem(self._nixl.nixlRegDList(self._segment, [row]), [])
        self._num_waiting = 0
        other = 1 - session.rank
        communicator = session.communicator
        mine = torch.frombuffer(bytearray(self._agent.getLocalMD()), dtype=torch.uint8)
        work = communicator.isend(mine, other)
        theirs = communicator.recv(other)
        work.wait()
        self._peer = self._agent.loadRemoteMD(theirs.numpy().tobytes()).decode()
        place = torch.tensor([self._address, self._device])
        work = communicator.isend(place, other)
        self._there = communicator.recv(other).tolist()
        work.wait()

    def notify(self, message: bytes) -> None:
        """Send a message."""
        self._agent.genNotif(self._peer, message, [])

    def await_message(self) -> None:
        """Wait for one."""
        while not self._num_waiting:
            for messages in self._agent.getNotifs({}, []).values():
                self._num_waiting += len(messages)
        self._num_waiting -= 1

    def read(self, nbytes: int, message: bytes) -> None:
        """Read from the other's buffer into ours, then send a message."""
        handle: Any = self._agent.createXferReq(
            self._nixl.NIXL_READ,
            self._place(self._address, nbytes, self._device),
            self._place(self._there[0], nbytes, self._there[1]),
            self._peer,
            message,
            [],
        )
        state = self._agent.postXferReq(handle, message)
        while state == self._nixl.NIXL_IN_PROG:
            state = self._agent.getXferStatus(handle)
        self._agent.releaseXferReq(handle)

    def _place(self, address: int, nbytes: int, device: int) -> Any:
        row = np.array([[address, nbytes, device]], dtype=np.uint64)
        return self._nixl.nixlXferDList(self._segment, row)
