"""Sends and receives the messages of one collective over the connections of a world.

Each collective of a world uses its own tags, above the tags of sends and receives. The tags come from the number of the collective, which
is equal at all members because they start their collectives in the same order. Between two members, messages of one kind are received in
the order in which they were sent.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from multiworld.ops.operation import Operation, Part
from multiworld.transport.connection import PeerConnection, Transfer, message_head, sealed

_FIRST_TAG = 1 << 31
"""Tags from here on belong to collectives."""
_NUMBERS = 1 << 30
"""Collective numbers wrap around at this value."""
OPERAND, RESULT = 0, 1
"""Kinds of messages. Each has its own tag, so that an early result does not wait for a late operand."""


class CollectiveChannel:
    """The messages of one collective.

    Attributes:
        peers: ranks of the other members, in ascending order from this rank, wrapping around.

    Args:
        lines: the connections of this world, by rank.
        number: how many collectives this world started before.
        lock: the lock of the world.
        check: raises WorldError when the world has ended. Called under `lock`.
    """

    def __init__(
        self,
        operation: Operation,
        lines: Mapping[int, PeerConnection],
        number: int,
        lock: threading.RLock,
        check: Callable[[], None],
    ) -> None:
        self._operation = operation
        self._lines = lines
        # Each member starts with the next rank. If all sent to rank 0 first, the other ranks would be idle meanwhile.
        self.peers = tuple(sorted(lines, key=lambda peer: (peer - self.rank) % self.size))
        self._tag = _FIRST_TAG + 2 * (number % _NUMBERS)
        self._lock = lock
        self._check = check

    @property
    def rank(self) -> int:
        """Rank of this member."""
        return next(rank for rank in range(self.size) if rank not in self._lines)

    @property
    def size(self) -> int:
        """Number of members, including this one."""
        return len(self._lines) + 1

    def post_send(
        self, peer: int, data: Tensor, words: str, on_carried: Callable[[], object], kind: int = OPERAND
    ) -> None:
        """Send `data`, contiguous and on the host. It must not change until `on_carried` is called.

        Args:
            words: signature of the message; the receiver must pass the same.
            on_carried: called under the world's lock, on any thread.
            kind: `OPERAND` or `RESULT`.
        Raises:
            RuntimeError: the connection is lost.
            WorldError: the world has ended.
        """
        letter = Transfer(Part(self._operation, on_carried), message_head(words, self._tag + kind, data.nbytes))
        letter.put(data)
        with self._lock:
            self._check()
            self._lines[peer].send(letter, self._tag + kind)

    def post_receive(
        self, peer: int, data: Tensor, words: str, on_carried: Callable[[], object], kind: int = OPERAND
    ) -> None:
        """Receive into `data`, contiguous and on the host. Arguments and errors as in `post_send`."""
        letter = Transfer(Part(self._operation, on_carried), sealed(words))
        letter.put(data)
        with self._lock:
            self._check()
            self._lines[peer].receive(letter, self._tag + kind)

    def send(self, peer: int, data: Tensor, kind: int = OPERAND) -> asyncio.Future[None]:
        """Like `post_send`, but returns a future of the running event loop."""
        carried, on_carried = _awaitable()
        self.post_send(peer, data, self._words(data), on_carried, kind)
        return carried

    def receive(self, peer: int, data: Tensor, kind: int = OPERAND) -> asyncio.Future[None]:
        """Like `post_receive`, but returns a future of the running event loop."""
        carried, on_carried = _awaitable()
        self.post_receive(peer, data, self._words(data), on_carried, kind)
        return carried

    def _words(self, data: Tensor) -> str:
        return f"{self._operation.name}, {data.nbytes} bytes"


def _awaitable() -> tuple[asyncio.Future[None], Callable[[], None]]:
    """A future of the running event loop and a function that completes it from any thread."""
    loop = asyncio.get_running_loop()
    carried: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not carried.done():
            carried.set_result(None)

    def on_carried() -> None:
        if asyncio._get_running_loop() is loop:
            settle()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing awaits the future
                loop.call_soon_threadsafe(settle)

    return carried, on_carried
