"""The connection between a member and the rendezvous server: a world of two, so each end detects the loss of the other by heartbeats."""

import asyncio

import torch

from multiworld.elastic.protocol.messages import MAX_MESSAGE_BYTES, Message, decode, encode
from multiworld.errors import WorldError
from multiworld.manager import WorldManager

_MAX_QUEUED = 1000
"""Maximum number of messages that wait to be sent; a view change needs a few."""


def link_name(world_name: str, member_id: str) -> str:
    """Return the name of the two-member world for this member."""
    return f"{world_name}@{member_id}"


class RendezvousLink:
    """One end of the connection. `send` only queues the message and never waits."""

    def __init__(self, manager: WorldManager, name: str, rank: int) -> None:
        self.name = name
        self._manager = manager
        self._peer = 1 - rank
        self._queue: asyncio.Queue[Message] = asyncio.Queue(_MAX_QUEUED)
        self._sender: asyncio.Task[None] | None = None

    async def open(self, addr: str, port: int, timeout_s: float) -> None:
        """Connect to the peer and start the sender task. Raises the errors of `initialize_world`."""
        await self._manager.initialize_world(
            self.name, 1 - self._peer, 2, "multiworld", addr, port, timeout_s, verify_collectives=False
        )
        self._sender = asyncio.get_running_loop().create_task(self._send_queued())

    def send(self, message: Message) -> None:
        """Queue a message. If the link is lost, `receive` raises the error; `send` does not."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:  # the peer sends heartbeats but reads no messages
            self._manager.world(self.name).close()

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

        await self._manager.world(self.name).recv_message(accept, self._peer)
        return decode(body.numpy().tobytes())

    async def close(self, grace_s: float = 0.0) -> None:
        """Close the connection after waiting up to `grace_s` seconds until the queued messages are sent. Idempotent."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sent = asyncio.create_task(self._queue.join())
            if grace_s:
                await asyncio.wait((sent, sender), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            for task in (sent, sender):
                task.cancel()
            await asyncio.gather(sent, sender, return_exceptions=True)
        if self.name in self._manager.worlds:
            self._manager.remove_world(self.name)

    async def _send_queued(self) -> None:
        while True:
            message = await self._queue.get()
            body = torch.frombuffer(bytearray(encode(message)), dtype=torch.uint8)
            try:
                await self._manager.world(self.name).start_send_message(b"", body, self._peer)
            except WorldError:
                return
            self._queue.task_done()
