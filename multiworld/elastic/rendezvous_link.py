"""The connection between a member and the rendezvous server: a world of two, so each end detects the loss of the other by heartbeats."""

import asyncio

import torch

from multiworld.elastic.protocol.messages import MAX_MESSAGE_BYTES, Message, decode, encode
from multiworld.errors import WorldError
from multiworld.manager import WorldManager
from multiworld.ops.operation import Operation
from multiworld.world import World

_MAX_QUEUED = 1000
"""Maximum number of messages that wait to be sent; a view change needs a few."""


def link_name(world_name: str, member_id: str) -> str:
    """Return the name of the two-member world for this member."""
    return f"{world_name}@{member_id}"


class RendezvousLink:
    """One end of the connection. `send` never waits."""

    def __init__(self, manager: WorldManager, name: str, rank: int) -> None:
        self.name = name
        self._manager = manager
        self._peer = 1 - rank
        self._world: World | None = None
        self._early: list[Message] = []  # sent before the connection is open
        self._unsent: set[Operation] = set()

    async def open(self, addr: str, port: int, timeout_s: float) -> None:
        """Connect to the peer. Raises the errors of `initialize_world`."""
        self._world = await self._manager.initialize_world(
            self.name, 1 - self._peer, 2, "multiworld", addr, port, timeout_s, verify_collectives=False
        )
        for message in self._early:
            self.send(message)

    def send(self, message: Message) -> None:
        """Send a message, or keep it until the link is open. If the link is lost, `receive` raises the error; `send` does not."""
        if self._world is None:
            self._early.append(message)
            return
        if len(self._unsent) >= _MAX_QUEUED:  # the peer sends heartbeats but reads no messages
            self._world.close()
            return
        body = torch.frombuffer(bytearray(encode(message)), dtype=torch.uint8)
        try:
            sending = self._world.start_send_message(b"", body, self._peer)
        except WorldError:
            return
        self._unsent.add(sending)
        sending.add_done_callback(lambda _: self._unsent.discard(sending))

    async def receive(self) -> Message:
        """Wait for the next message.

        Raises:
            WorldError: the connection is lost, or the message is too long.
            MessageError: protocol error.
        """
        body = torch.empty(0, dtype=torch.uint8)

        def accept(_header: bytes, size: int) -> torch.Tensor:
            nonlocal body
            if not 0 < size <= MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {size} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
            body = torch.empty(size, dtype=torch.uint8)
            return body

        assert self._world is not None
        await self._world.recv_message(accept, self._peer)
        return decode(body.numpy().tobytes())

    async def close(self, grace_s: float = 0.0) -> None:
        """Close the connection after waiting up to `grace_s` seconds until the messages are sent. Idempotent."""
        if self._unsent and grace_s:
            await asyncio.wait([operation.future for operation in self._unsent], timeout=grace_s)
        if self.name in self._manager.worlds:
            self._manager.remove_world(self.name)
