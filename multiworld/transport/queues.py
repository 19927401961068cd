"""The messages of a connection that wait for their transfer, by tag, and the receive credits of the peer. Does no I/O."""

from collections import deque
from collections.abc import Callable

from torch import Tensor

from multiworld.ops.operation import Message, Receive, View
from multiworld.transport.wire import decode_signature

MAX_CREDITS = 1 << 18
"""Maximum number of receive credits that a peer may have granted and that are not used yet, over all tags."""


class MessageQueues:
    """Holds the pending messages of one connection. Messages with the same tag keep their order."""

    def __init__(self) -> None:
        self._receives: dict[int, deque[Message]] = {}
        self._sends: dict[int, deque[Message]] = {}
        self._credits: dict[int, int] = {}  # by tag, not used yet
        self._total_credits = 0

    @property
    def pending(self) -> bool:
        """Return whether a message waits for its transfer."""
        return bool(self._receives or self._sends)

    def add_receive(self, message: Message) -> None:
        self._receives.setdefault(message.tag, deque()).append(message)

    def add_send(self, message: Message) -> None:
        self._sends.setdefault(message.tag, deque()).append(message)

    def has_credit(self, tag: int) -> bool:
        return tag in self._credits

    def grant(self, tag: int) -> bool:
        """Add a receive credit of the peer. Returns whether a send waits with this tag. Raises ValueError with too many credits."""
        self._credits[tag] = self._credits.get(tag, 0) + 1
        self._total_credits += 1
        if self._total_credits > MAX_CREDITS:
            raise ValueError(f"it granted more than {MAX_CREDITS} receive credits at once")
        return tag in self._sends

    def pop_ready(self, tag: int) -> Message | None:
        """Take the next send with this tag, and a credit for it. None if there is no credit, or its data is not set yet."""
        messages = self._sends.get(tag)
        if not messages or tag not in self._credits or messages[0].data is None:
            return None
        message = messages.popleft()
        if not messages:
            del self._sends[tag]
        self._total_credits -= 1
        self._credits[tag] -= 1
        if not self._credits[tag]:
            del self._credits[tag]
        return message

    def match(self, tag: int, size: int, signature: bytes, place: Callable[[View], Tensor] = View.allocate) -> Message:
        """Take the receive of an announced message, with its memory. Raises ValueError when it does not expect this message.

        Args:
            place: returns the memory of a receive that takes a view.
        """
        messages = self._receives.get(tag)
        if not messages:
            raise ValueError(f"it sent a message with tag {tag}, for which no receive is pending")
        message = messages[0]
        if isinstance(message, Receive) and message.view is not None:
            message.view.accept(signature, size)
            message.set_data(place(message.view))
            message.head = signature
        if size != len(message.memory) or signature != message.head:
            raise ValueError(
                f"it sent {decode_signature(signature)} where {decode_signature(message.head)} was expected; "
                f"{size} bytes instead of {len(message.memory)}"
            )
        messages.popleft()
        if not messages:
            del self._receives[tag]
        return message

    def clear(self) -> list[Message]:
        """Remove all messages and credits. Returns the messages."""
        pending = [message for queue in (*self._receives.values(), *self._sends.values()) for message in queue]
        for each in (self._receives, self._sends, self._credits):
            each.clear()
        return pending
