"""Ordered messages over a world of two ranks. Several may be in flight."""

from collections.abc import Callable

import torch
from torch import Tensor

from multiworld import BrokenWorldException, Cause, Operation, World, WorldError
from multiworld_serving.common.wire.message import Message


class Channel:
    """One end of a world of two. Any number of tasks may send; one task receives.

    Args:
        peer: the other end's rank.
        check: called with each message before memory is allocated for its payload. It raises WireError for a message that is not
            expected now, so the peer cannot choose how much memory is allocated. Another thread may call it.
    """

    def __init__(self, world: World, peer: int, check: Callable[[Message], None]) -> None:
        self.world = world
        self.peer = peer
        self._check = check

    async def send(self, message: Message) -> None:
        """Send a message. Returns when the peer has started to receive it.

        A message that cannot be sent breaks the world, because the peer would wait for it.

        Raises:
            BrokenWorldException, WorldClosedError: the link ended.
        """
        await self.start(message)

    def start(self, message: Message) -> Operation:
        """Start to send a message and return at once. Messages are sent in the order of these calls; see `send`."""
        try:
            return self.world.start_send_message(message.header(), message.payload, self.peer)
        except WorldError:
            raise
        except Exception as error:
            detail = f"{message.kind.name} {message.number} cannot be sent: {type(error).__name__}: {error}"
            self.world.fail(Cause.ABORTED, self.world.rank, detail)
            raise BrokenWorldException(self.world.name, Cause.ABORTED, self.world.rank, detail) from error

    async def receive(self, *, copy: bool = True) -> Message:
        """Receive the next message.

        Args:
            copy: whether the payload gets memory of its own. Without, it stays in shared memory of the sender if it can, until all tensors
                that use it are dropped.
        Raises:
            BrokenWorldException: the link ended; with cause `error` if the peer sent an invalid or unexpected message.
            WorldClosedError: this process closed the link.
        """
        message: Message | None = None

        def check(data: bytes, size_bytes: int) -> Tensor | None:
            nonlocal message
            message = Message.parse(data, size_bytes)
            self._check(message)
            if copy and message.shape is not None:
                message.payload = torch.empty(message.shape, dtype=message.dtype)
            return message.payload

        view = await self.world.recv_view(check, self.peer)
        assert message is not None, "a view is received after `check` has returned"
        if message.payload is None and message.shape is not None:
            message.payload = view.data.view(message.dtype).view(message.shape)
        return message
