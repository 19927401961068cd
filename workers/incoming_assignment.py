"""A stage assignment as it arrives: its description, then its weights in chunks."""

from __future__ import annotations

import asyncio
import hashlib

from multiworld_serving.common.wire import Message, MessageKind, StageAssignment, WireError
from multiworld_serving.models import StageError, StageSpec, Tuning


class IncomingAssignment:
    """
    Args:
        message: the ASSIGN message. WEIGHTS messages follow after FETCH.

    Attributes:
        is_fetching: whether FETCH was sent.
    Raises:
        WireError, models.StageError: the message is invalid.
    """

    def __init__(self, message: Message) -> None:
        self.assignment = StageAssignment.from_json(message.text())
        self.spec = StageSpec.from_json(self.assignment.spec)
        self.sample_shape = self.assignment.sample_shape
        self.is_fetching = False
        self._weights = bytearray()
        self._complete = asyncio.Event()

    @property
    def tuning(self) -> Tuning:
        """Raises models.StageError for unknown values."""
        assignment = self.assignment
        return Tuning(assignment.precision, assignment.optimize, assignment.tuning_ms / 1e3)

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
        if len(self._weights) == announced:
            self._complete.set()
        return self._complete.is_set()

    async def take_weights(self) -> bytes:
        """Wait until all weights have arrived, return and release them."""
        await self._complete.wait()
        weights, self._weights = bytes(self._weights), bytearray()
        return weights

    def check_weights(self, weights: bytes) -> None:
        """Raise StageError for other weights than announced. Blocks for up to a second."""
        found, announced = hashlib.sha256(weights).hexdigest(), self.assignment.weights_sha256
        if found != announced:
            raise StageError(f"the weights have the SHA-256 hash {found}, but {announced} was announced")

    def message(self, kind: MessageKind) -> Message:
        """A message to the leader about this assignment, without a payload."""
        return Message(kind, stage=self.spec.index, version=self.assignment.version)

    def reply(self, kind: MessageKind, text: str) -> Message:
        """A message to the leader about this assignment."""
        return Message.from_text(kind, text, stage=self.spec.index, version=self.assignment.version)
