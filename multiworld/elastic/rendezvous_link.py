"""The connection between a member and the rendezvous server: a world of two, so each end detects the loss of the other by heartbeats."""

import contextlib

import torch

from multiworld.elastic.protocol.messages import Message, decode, encode
from multiworld.errors import WorldError
from multiworld.manager import WorldManager
from multiworld.ops.buffers import byte_view
from multiworld.world import World

_MAX_MESSAGE_BYTES = 1 << 20
"""Maximum length of a message; a view of a thousand members takes a tenth of it."""


class RendezvousLink:
    """One end of an open connection. `send` never waits."""

    def __init__(self, manager: WorldManager, world: World) -> None:
        self._manager = manager
        self._world = world

    @classmethod
    async def open(
        cls, manager: WorldManager, world_name: str, member_id: str, rank: int, addr: str, port: int, timeout_s: float
    ) -> "RendezvousLink":
        """Connect to the peer. The rendezvous server has rank 0. Raises the errors of `initialize_world`."""
        name = f"{world_name}@{member_id}"
        return cls(manager, await manager.initialize_world(name, rank, 2, "multiworld", addr, port, timeout_s))

    def send(self, message: Message) -> None:
        """Send a message. If the link is lost, `receive` raises the error; `send` does not."""
        body = torch.frombuffer(bytearray(encode(message)), dtype=torch.uint8)
        with contextlib.suppress(WorldError):
            self._world.start_send_message(b"", body, 1 - self._world.rank)

    async def receive(self) -> Message:
        """Wait for the next message.

        Raises:
            WorldError: the connection is lost, or the message is too long.
            MessageError: protocol error.
        """

        def check(_header: bytes, size: int) -> None:
            if size > _MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {size} bytes, at most {_MAX_MESSAGE_BYTES} are allowed")

        view = await self._world.recv_view(check, 1 - self._world.rank)
        return decode(bytes(byte_view(view.data)))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._manager.worlds.get(self._world.name) is self._world:
            self._manager.remove_world(self._world.name)
