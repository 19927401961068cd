"""The messages of one collective between this member and the others, over the lines.

They have a tag that no program can use, and that is another for each collective of a world: its number, counted alike at all members,
who start their collectives in the same order. Between two members they are taken in the order in which they were sent.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from multiworld.line import Letter, Line, message_head, sealed
from multiworld.operation import Operation, Part

_FIRST_TAG = 1 << 31
"""Programs have the tags below."""
_NUMBERS = 1 << 30


class Exchange:
    """
    Attributes:
        peers: ranks of the others, from ours on around the world.

    Args:
        number: how many collectives this world has started before.
        check: raises what ends the operation, where the world has ended. Called under `lock`, the world's.
    """

    def __init__(
        self,
        operation: Operation,
        lines: Mapping[int, Line],
        number: int,
        lock: threading.RLock,
        check: Callable[[], None],
    ) -> None:
        self._operation = operation
        self._lines = lines
        # Each begins with its neighbour: did all send to rank 0 first, the others would have nothing to do meanwhile.
        self.peers = tuple(sorted(lines, key=lambda peer: (peer - self.rank) % self.size))
        self._tag = _FIRST_TAG + number % _NUMBERS
        self._lock = lock
        self._check = check

    @property
    def rank(self) -> int:
        """Ours: the one that is no peer's."""
        return next(rank for rank in range(self.size) if rank not in self._lines)

    @property
    def size(self) -> int:
        """Members, ourselves included."""
        return len(self._lines) + 1

    def post_send(self, peer: int, data: Tensor, words: str, on_carried: Callable[[], object]) -> None:
        """Send `data`, contiguous and on the host, which must not change until it is carried.

        Args:
            words: what it is; the receiver must expect the same.
        Raises:
            RuntimeError: the line is lost.
            WorldError: the world has ended.
        """
        letter = Letter(Part(self._operation, on_carried), message_head(words, self._tag, data.nbytes))
        letter.put(data)
        with self._lock:
            self._check()
            self._lines[peer].send(letter, self._tag)

    def post_receive(self, peer: int, data: Tensor, words: str, on_carried: Callable[[], object]) -> None:
        """Receive into `data`, contiguous and on the host. Raises as `post_send` does."""
        letter = Letter(Part(self._operation, on_carried), sealed(words))
        letter.put(data)
        with self._lock:
            self._check()
            self._lines[peer].receive(letter, self._tag)

    def send(self, peer: int, data: Tensor) -> asyncio.Future[None]:
        """`post_send`, to be awaited on the loop that runs now."""
        carried, on_carried = _awaitable()
        self.post_send(peer, data, self._operation.name, on_carried)
        return carried

    def receive(self, peer: int, data: Tensor) -> asyncio.Future[None]:
        """`post_receive`, to be awaited on the loop that runs now."""
        carried, on_carried = _awaitable()
        self.post_receive(peer, data, self._operation.name, on_carried)
        return carried


def _awaitable() -> tuple[asyncio.Future[None], Callable[[], None]]:
    loop = asyncio.get_running_loop()
    carried: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not carried.done():
            carried.set_result(None)

    def on_carried() -> None:
        if asyncio._get_running_loop() is loop:
            settle()
        else:
            with contextlib.suppress(RuntimeError):  # that loop is closed, and nobody awaits it any more
                loop.call_soon_threadsafe(settle)

    return carried, on_carried
