"""A stage assignment as it arrives: its description, then its weights in chunks."""

from __future__ import annotations

from multiworld_serving.common.wire import Message, MessageKind, StageAssignment, WireError
from multiworld_serving.models import StageSpec


class IncomingAssignment:
    """
    Args:
        message: the ASSIGN message. WEIGHTS messages follow.

    Raises:
        WireError, models.StageError: the message is invalid.
    """

    def __init__(self, message: Message) -> None:
        self.assignment = StageAssignment.from_json(message.text())
        self.spec = StageSpec.from_json(self.assignment.spec)
        self.sample_shape = self.assignment.sample_shape
        self._weights = bytearray()

    @property
    def missing_bytes(self) -> int:
        """Bytes of weights that have not arrived yet."""
        return self.assignment.weights_bytes - len(self._weights)

    def add(self, message: Message) -> bool:
        """Append a chunk of weights. Returns whether it was the last. Raises WireError for more bytes than announced."""
        if message.payload is not None:
            self._weights += message.payload.numpy().tobytes()
        announced = self.assignment.weights_bytes
        if message.payload is None or len(self._weights) > announced:
            raise WireError(f"WEIGHTS: {len(self._weights)} bytes; expected {announced}")
        return len(self._weights) == announced

    def take_weights(self) -> bytes:
        """Return the weights and release them."""
        weights, self._weights = bytes(self._weights), bytearray()
        return weights

    def reply(self, kind: MessageKind, text: str) -> Message:
        """A message to the leader about this assignment."""
        return Message.from_text(kind, text, stage=self.spec.index, version=self.assignment.version)
