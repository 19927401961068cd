"""An order as it comes in: what to hold, then its weights, piece by piece."""

from __future__ import annotations

from models import StageSpec
from wire import Kind, Message, StageOrder, WireError

_MAX_WEIGHTS_BYTES = 4 << 30


class IncomingOrder:
    """
    Args:
        message: the order itself; its weights follow.

    Raises:
        WireError, models.StageError: it makes no sense.
    """

    def __init__(self, message: Message) -> None:
        self.order = StageOrder.from_json(message.text())
        self.spec = StageSpec.from_json(self.order.spec)
        self.row_shape = self.order.row_shape
        if not 0 < self.order.weights_bytes <= _MAX_WEIGHTS_BYTES:
            raise WireError(f"weights of {self.order.weights_bytes} bytes")
        self._weights = bytearray()

    def add(self, message: Message) -> bool:
        """Take a piece of the weights; gives whether it was the last one. Raises WireError when there are more than were promised."""
        if message.payload is not None:
            self._weights += message.payload.numpy().tobytes()
        promised = self.order.weights_bytes
        if message.payload is None or len(self._weights) > promised:
            raise WireError(f"{len(self._weights)} bytes of weights, {promised} were promised")
        return len(self._weights) == promised

    def take_weights(self) -> bytes:
        """All of them, once: they are not kept here."""
        weights, self._weights = bytes(self._weights), bytearray()
        return weights

    def reply(self, kind: Kind, text: str) -> Message:
        """What the leader is told of it."""
        return Message.of_text(kind, text, stage=self.spec.index, version=self.order.version)
