"""Ordered messages over a world of two ranks. Several may be in flight."""

import asyncio
from collections.abc import Callable

import torch

from multiworld import BrokenWorldException, Cause, World, WorldError
from multiworld_serving.common.wire.message import HEADER_BYTES, Header, Message


class Channel:
    """One end of a leader-worker link. Any number of tasks may send; one task receives.

    Args:
        peer: the other end's rank.
        check: called with each header before memory is allocated for its payload. It raises WireError for a header that is not
            expected now, so the peer cannot choose how much memory is allocated.
    """

    def __init__(self, world: World, peer: int, check: Callable[[Header], None]) -> None:
        self.world = world
        self._peer = peer
        self._check = check
        self._header = torch.empty(HEADER_BYTES, dtype=torch.uint8)

    async def send(self, message: Message) -> None:
        """Send a message. Returns when the peer has received it.

        Header and payload are posted without an await in between, so messages of several tasks never interleave. A message that
        cannot be posted breaks the world, because the peer would wait for it or for its remainder.

        Raises:
            BrokenWorldException, WorldClosedError: the link ended.
        """
        try:
            operations = [self.world.start_send(message.header(), self._peer)]
            if message.payload is not None and message.payload.numel():
                operations.append(self.world.start_send(message.payload, self._peer))
        except WorldError:
            raise
        except Exception as error:
            detail = f"{message.kind.name} {message.batch} cannot be sent: {type(error).__name__}: {error}"
            self.world.break_(Cause.ABORTED, self.world.rank, detail)
            raise BrokenWorldException(self.world.name, Cause.ABORTED, self.world.rank, detail) from error
        await asyncio.gather(*(self.world.finish(operation) for operation in operations))

    async def receive(self) -> Message:
        """Receive the next message.

        Raises:
            WireError: the peer sent an invalid or unexpected message. The caller must break this world.
            BrokenWorldException, WorldClosedError: the link ended.
        """
        await self.world.recv(self._header, self._peer)
        header = Header.parse(self._header)
        self._check(header)
        if header.shape is None:
            return header.message(None)
        payload = torch.empty(header.shape, dtype=header.dtype)
        if payload.numel():
            await self.world.recv(payload, self._peer)
        return header.message(payload)
