"""What a connection carries: the messages that a member sends or receives, the bytes to write, and who is told about them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from multiworld.errors import Cause
from multiworld.ops.buffers import byte_view
from multiworld.ops.operation import Operation
from multiworld.ops.views import View


class ConnectionOwner(Protocol):
    """Receives the results of transfers. All methods are called under the world's lock."""

    def on_transferred(self, operation: Operation) -> None:
        """A sent message is completely in the kernel's buffer, or a message was completely received. May use the connection."""

    def on_connection_lost(self, peer: int, pending: list[Operation], reason: str) -> None:
        """The connection failed while these operations were pending."""

    def on_error(self, peer: int, cause: Cause, detail: str) -> None:
        """The world must break. ERROR: the peer violated the protocol, or its message does not match the receive.

        LOCAL: this member failed to handle the received data, for example because memory is short.
        """


@dataclass(slots=True, eq=False)
class Transfer:
    """A message that this member sends or receives.

    Attributes:
        operation: the operation, or the message of a collective, that completes with this transfer.
        head: for a send, the complete head; for a receive, the expected signature (`encode_signature`).
        lent: a sent tensor of `allocate` may not be changed until it is dropped, so a send in place is complete when it is announced.
        memory: bytes of the sent or receiving tensor; keeps the tensor alive. None while the data is being copied from a device.
        data: the tensor that `memory` belongs to.
        accept: for a receive without memory, returns it when a head has arrived; see multiworld/ops/p2p.py.
        view: for a receive without memory that takes a view: gets the data; see multiworld/ops/p2p.py.
    """

    operation: Operation
    head: bytes
    lent: bool = False
    memory: memoryview | None = None
    data: Tensor | None = None
    accept: Callable[[bytes, int], Tensor] | None = None
    view: View | None = None

    def set_data(self, data: Tensor) -> None:
        """Use the memory of `data`, a contiguous tensor on the host."""
        self.data = data
        self.memory = byte_view(data)


@dataclass(slots=True, eq=False)
class Output:
    """Bytes to write.

    Attributes:
        operation: completes when the bytes are written.
        joined: the next output must follow directly (head and message).
        fd: descriptor to pass with the bytes; -1 for none.
        in_place: for the PLACE of a message: the message, which is copied if the kernel passes no more descriptors.
    """

    data: bytes | memoryview
    operation: Operation | None = None
    joined: bool = False
    fd: int = -1
    in_place: Transfer | None = None
