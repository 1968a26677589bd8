"""A message on the receiver's side, before it is received."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torch_nixl.p2p.description import Content

if TYPE_CHECKING:
    from torch_nixl.engine.streams import StreamOrder
    from torch_nixl.p2p.peer import Peer


class Message:
    """A message that has arrived; an `OfferedMessage` has not yet.

    Attributes:
        peer: Who sent it; None for this rank itself.
        source: Its rank.
        tag: Its tag.
        number: The sender's number for it.
        cost: Credit to give back once it is received; 0 for none.
        description: What it is.
        data: The body of its frame; the tensors, if it is this rank's own; None if it is offered.
        order: When this rank's own tensor is there, if it is device memory.
    """

    __slots__ = ("cost", "data", "description", "number", "order", "peer", "source", "tag")

    def __init__(
        self,
        peer: Peer | None,
        source: int,
        tag: int,
        number: int,
        cost: int,
        description: Content,
        data: bytes | tuple[torch.Tensor, ...] | None,
    ) -> None:
        self.peer = peer
        self.source = source
        self.tag = tag
        self.number = number
        self.cost = cost
        self.description = description
        self.data = data
        self.order: StreamOrder | None = None
