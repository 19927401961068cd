"""Messages over a world of two, in order, several under way at once."""

import asyncio

import torch

from multiworld import World
from wire.message import HEADER_BYTES, Header, Message


class Channel:
    """One end of a leader-worker link. Any number of tasks may send; one task receives.

    Args:
        peer: the other end's rank.
        max_payload_bytes: longer messages are refused before memory is taken for them.
    """

    def __init__(self, world: World, peer: int, max_payload_bytes: int) -> None:
        self.world = world
        self._peer = peer
        self._max_payload_bytes = max_payload_bytes
        self._header = torch.empty(HEADER_BYTES, dtype=torch.uint8)

    async def send(self, message: Message) -> None:
        """Send; complete when the other side has taken it.

        Header and payload are posted without a pause between them, so that messages of several tasks never interleave.
        Raises BrokenWorldException or WorldClosedError.
        """
        operations = [self.world.start_send(message.header(), self._peer)]
        if message.payload is not None and message.payload.numel():
            operations.append(self.world.start_send(message.payload, self._peer))
        await asyncio.gather(*(self.world.finish(operation) for operation in operations))

    async def receive(self) -> Message:
        """The next message.

        Raises:
            WireError: the other side talks nonsense; break this world.
            BrokenWorldException, WorldClosedError: the link ended.
        """
        await self.world.recv(self._header, self._peer)
        header = Header.parse(self._header, self._max_payload_bytes)
        if not header.payload_bytes:
            return header.message(torch.empty(header.shape, dtype=header.dtype) if header.shape else None)
        payload = torch.empty(header.shape, dtype=header.dtype)
        await self.world.recv(payload, self._peer)
        return header.message(payload)
