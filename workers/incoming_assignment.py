"""A stage assignment as it arrives: its description, then its weights in chunks."""

from __future__ import annotations

import asyncio
import hashlib

from multiworld_serving.common.wire.join import StageAssignment
from multiworld_serving.common.wire.message import Message, MessageKind, WireError
from multiworld_serving.models.bundle.stage import BundleStageSpec
from multiworld_serving.models.errors import StageError
from multiworld_serving.models.optimize.tuning import Tuning
from multiworld_serving.models.weights.tensor_file import TensorFile
from multiworld_serving.workers.compute.stage_store import StageTask


class IncomingAssignment:
    """
    Args:
        message: the ASSIGN message. WEIGHTS messages follow after FETCH_WEIGHTS.

    Attributes:
        task: what to load. Its weights arrive with `add`.
        is_fetching: whether FETCH_WEIGHTS was sent.
        complete: set when all weights have arrived.
    Raises:
        WireError, models.StageError: the message is invalid.
    """

    def __init__(self, message: Message) -> None:
        self.assignment = StageAssignment.from_json(message.text())
        self.spec = BundleStageSpec.from_json(self.assignment.spec)
        self.task = StageTask(
            self.spec,
            TensorFile.in_memory(),
            self.assignment.max_batch_size,
            Tuning(self.assignment.precision, self.assignment.optimize),
        )
        self.is_fetching = False
        self._arrived = 0
        self.complete = asyncio.Event()

    @property
    def missing_bytes(self) -> int:
        """Bytes of weights that have not arrived yet."""
        return self.assignment.weights_bytes - self._arrived

    def add(self, message: Message) -> None:
        """Append a chunk of weights. Raises WireError for more bytes than announced."""
        announced = self.assignment.weights_bytes
        size = 0 if message.payload is None else message.payload.nbytes
        if message.payload is None or size > self.missing_bytes:
            raise WireError(f"WEIGHTS: {self._arrived + size} bytes; expected {announced}")
        self.task.weights.write(message.payload.numpy().data, self._arrived)
        self._arrived += size
        if not self.missing_bytes:
            self.complete.set()

    def check_weights(self) -> None:
        """Raise StageError for other weights than announced. Blocks for up to a second."""
        with open(f"/proc/self/fd/{self.task.weights.fileno()}", "rb") as file:
            found, announced = hashlib.file_digest(file, "sha256").hexdigest(), self.assignment.weights_sha256
        if found != announced:
            raise StageError(f"the weights have the SHA-256 hash {found}, but {announced} was announced")

    def message(self, kind: MessageKind) -> Message:
        """A message to the leader about this assignment, without a payload."""
        return Message(kind, stage=self.spec.index, version=self.assignment.version)

    def reply(self, kind: MessageKind, text: str) -> Message:
        """A message to the leader about this assignment."""
        return Message.from_text(kind, text, stage=self.spec.index, version=self.assignment.version)
