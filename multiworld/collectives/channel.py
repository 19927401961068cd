"""Sends and receives the messages of one collective over the connections of a world.

Each collective of a world uses its own tags, above the tags of sends and receives. The tags come from the number of the collective, which
is equal at all members because they start their collectives in the same order. Between two members, messages of one kind are received in
the order in which they were sent.
"""

import asyncio
import re
import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from multiworld.ops.operation import Collective, Message
from multiworld.transport.connection import PeerConnection
from multiworld.transport.wire import encode_signature, message_head

_FIRST_TAG = 1 << 31
"""Tags from here on belong to collectives."""
NUMBERED_FROM = 1 << 29
"""Numbers below this one count the collectives of the world, and wrap around here. The others are chosen by the caller."""
OPERAND, RESULT = 0, 1
"""Kinds of messages. Each has its own tag, so that an early result does not wait for a late operand."""


class CollectiveChannel:
    """Sends and receives the messages of one collective.

    Attributes:
        name: name of the collective.
        peers: ranks of the other members, in ascending order from this rank, wrapping around.
        rank, size: rank of this member, and number of members including this one.
        tx_bytes, rx_bytes: bytes of the messages that were started, without heads.

    Args:
        connections: the connections of this world, by rank.
        number: identifies the collective at all members; below 2 * `NUMBERED_FROM`.
        lock: the lock of the world.
        check: raises WorldError when the world has ended. Called under `lock`.
    """

    def __init__(
        self,
        operation: Collective,
        connections: Mapping[int, PeerConnection],
        number: int,
        lock: threading.RLock,
        check: Callable[[], None],
    ) -> None:
        self.name = operation.name
        self._operation = operation
        # Without sizes, so that it fits into a head. The receiver compares the sizes of the messages.
        self._kind = re.sub(r"\[\d+\]", "", operation.signature)
        self._connections = connections
        self.tx_bytes = self.rx_bytes = 0
        self.size = len(connections) + 1
        self.rank = next(rank for rank in range(self.size) if rank not in connections)
        # Each member starts with the next rank. If all sent to rank 0 first, the other ranks would be idle meanwhile.
        self.peers = tuple(sorted(connections, key=lambda peer: (peer - self.rank) % self.size))
        self._tag = _FIRST_TAG + 2 * number
        self._lock = lock
        self._check = check

    def send(self, peer: int, data: Tensor, kind: int = OPERAND, what: str = "") -> asyncio.Future[None]:
        """Send `data`, contiguous and on the host. Returns a future of the running event loop; `data` must not change before it is done.

        Args:
            kind: `OPERAND` or `RESULT`.
            what: names the message instead of the collective. The receiver must expect an equal name and size.
        Raises:
            RuntimeError: the connection is lost.
            WorldError: the world has ended.
        """
        head = message_head(self._signature(data, what), self._tag + kind, data.nbytes)
        self.tx_bytes += data.nbytes
        return self._post(PeerConnection.send, peer, data, head, kind)

    def receive(self, peer: int, data: Tensor, kind: int = OPERAND, what: str = "") -> asyncio.Future[None]:
        """Receive into `data`, contiguous and on the host. Arguments, result and errors as in `send`."""
        self.rx_bytes += data.nbytes
        return self._post(PeerConnection.receive, peer, data, encode_signature(self._signature(data, what)), kind)

    def _post(
        self, start: Callable[[PeerConnection, Message], None], peer: int, data: Tensor, head: bytes, kind: int
    ) -> asyncio.Future[None]:
        whole = self._operation
        message = Message(signature=whole.signature, tag=self._tag + kind, head=head, posted=True, collective=whole)
        message.future = future = asyncio.get_running_loop().create_future()
        message.set_data(data)
        with self._lock:
            self._check()
            start(self._connections[peer], message)
        return future

    def _signature(self, data: Tensor, what: str) -> str:
        return f"{what}, {data.nbytes} bytes" if what else self._kind
