"""Frames between a frontend and a leader, over their world.

A frame is a header of fixed length, a body as JSON, whose type follows from the kind of frame (`BODIES`), and a payload. Frames that are
queued while another message is on its way travel together in one message, so the cost of a message is shared by the requests of a busy
service.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

import msgspec
import torch

from multiworld import BrokenWorldException, Cause, World, WorldClosedError
from multiworld.texts import shown
from multiworld_serving.common.wire import Channel, Header, Message, MessageKind, WireError
from multiworld_serving.server.administration import Desired, RestartStep
from multiworld_serving.server.frontends.messages import (
    Check,
    Done,
    LeaderState,
    Load,
    Metrics,
    Nothing,
    Operation,
    Predict,
    PredictReply,
    Rejection,
    Scrape,
)
from multiworld_serving.server.predictor import MAX_ROW_BYTES, ServedModel

_HEAD = struct.Struct("!BQII")
"""Kind, number, bytes of JSON, bytes of payload."""
_ALIGNED_BYTES = 8
"""Headers and payloads start at a multiple of this, so that tensors in them are aligned."""
_HEAD_BYTES = 24
MAX_BYTES = 8 * MAX_ROW_BYTES
"""Maximum payload of one frame."""
_MAX_ERROR_CHARS = 200
_MESSAGE_BYTES = 1 << 22
"""A message is closed when it has this size."""
_MAX_UNSENT_BYTES = 1 << 22
"""Bytes queued for sending above which `FrameLink.wait_writable` waits."""
_MAX_BACKLOG_BYTES = 2 * MAX_BYTES
"""Bytes queued for sending above which the link fails: some senders do not wait."""


class FrameKind(IntEnum):
    """What a frame contains. A reply has the same number as its request."""

    WELCOME = 1
    """Leader to frontend, first frame: the model."""
    STATE = 2
    """Leader to frontend: version, readiness, why requests are rejected, and the snapshot for the status. With a number: reply DONE."""
    CHECK = 3
    """Frontend to leader: would a request be rejected? Reply: ADMITTED or REJECTED."""
    ADMITTED = 4
    PREDICT = 5
    """Frontend to leader: the input of a request, or the id of one that the frontend keeps. Reply: PREDICTION or REJECTED."""
    PREDICTION = 6
    REJECTED = 7
    CANCEL = 8
    """Frontend to leader: the prediction is not needed any more."""
    QUIESCE = 9
    """Leader to frontend: reply DONE when this frontend has no request in flight."""
    DONE = 10
    """Completes a request for which there is no other reply, with its result or error."""
    OPERATION = 11
    """Frontend to leader: an administrative operation. Replies: STEP for each step, then DONE."""
    STEP = 12
    SCRAPE = 13
    """In both directions: reply METRICS with the receiver's metrics as text."""
    METRICS = 14
    LOAD = 15
    """Frontend to leader, once a second: its connections, requests in flight and edges."""
    FOLLOW = 16
    """Frontend to leader: what another leader serves."""


BODIES: dict[FrameKind, type[Any]] = {
    FrameKind.WELCOME: ServedModel,
    FrameKind.STATE: LeaderState,
    FrameKind.CHECK: Check,
    FrameKind.ADMITTED: Nothing,
    FrameKind.PREDICT: Predict,
    FrameKind.PREDICTION: PredictReply,
    FrameKind.REJECTED: Rejection,
    FrameKind.CANCEL: Nothing,
    FrameKind.QUIESCE: Nothing,
    FrameKind.DONE: Done,
    FrameKind.OPERATION: Operation,
    FrameKind.STEP: RestartStep,
    FrameKind.SCRAPE: Scrape,
    FrameKind.METRICS: Metrics,
    FrameKind.LOAD: Load,
    FrameKind.FOLLOW: Desired,
}
_DECODERS = {kind: msgspec.json.Decoder(body) for kind, body in BODIES.items()}
_ENCODER = msgspec.json.Encoder()
NOTHING = Nothing()


class Frame:
    """One received frame.

    Args:
        text: the body as JSON, decoded when it is first read.
        body: the decoded body, instead of `text`.
        payload: writable; not shared with other frames.
    """

    __slots__ = ("_body", "_text", "kind", "number", "payload")

    def __init__(
        self,
        kind: FrameKind,
        number: int,
        body: Any = NOTHING,
        payload: memoryview | None = None,
        text: memoryview | None = None,
    ) -> None:
        self.kind = kind
        self.number = number
        self.payload = memoryview(b"") if payload is None else payload
        self._body = body
        self._text = text

    @property
    def body(self) -> Any:
        """Of the type that `BODIES` names. Raises ValueError if it is not one."""
        if self._text is not None:
            try:
                self._body, self._text = _DECODERS[self.kind].decode(self._text), None
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                detail = shown(str(error), _MAX_ERROR_CHARS)
                raise ValueError(f"{self.kind.name}: {detail}; do both sides run the same release?") from error
        return self._body


def encode(kind: FrameKind, number: int = 0, body: Any = NOTHING, payload: bytes | memoryview = b"") -> bytearray:
    """One frame, padded so that the next one is aligned."""
    text = _ENCODER.encode(body)
    text += b" " * (-len(text) % _ALIGNED_BYTES)
    data = bytearray(_HEAD_BYTES)
    _HEAD.pack_into(data, 0, kind, number, len(text), len(payload))
    data += text
    data += payload
    data += bytes(-len(data) % _ALIGNED_BYTES)
    return data


def decode(data: memoryview) -> Iterator[Frame]:
    """The frames of one message. Raises ValueError if it is invalid."""
    at = 0
    while at < len(data):
        if len(data) - at < _HEAD_BYTES:
            raise ValueError("a frame ends in its header")
        kind, number, text_bytes, payload_bytes = _HEAD.unpack_from(data, at)
        body, end = at + _HEAD_BYTES + text_bytes, at + _HEAD_BYTES + text_bytes + payload_bytes
        if end > len(data):
            raise ValueError(f"a frame of {text_bytes} + {payload_bytes} bytes is longer than its message")
        yield Frame(FrameKind(kind), number, payload=data[body:end], text=data[at + _HEAD_BYTES : body])
        at = end + -end % _ALIGNED_BYTES


class FrameLink:
    """One end of the link between a frontend and a leader.

    Args:
        on_frame: called with each frame. A ValueError of it, for an invalid frame, ends the link.
    """

    def __init__(self, world: World, peer: int, on_frame: Callable[[Frame], None]) -> None:
        self.world = world
        self._channel = Channel(world, peer, _check)
        self._on_frame = on_frame
        self._queue: list[bytes | bytearray] = []
        self._queued_bytes = 0
        self._sending = False
        """Whether a message is on its way, or `_send_next` is about to be called."""
        self._writable = asyncio.Event()
        self._writable.set()
        self._ended = False

    def send(
        self,
        kind: FrameKind,
        number: int = 0,
        body: Any = NOTHING,
        payload: bytes | memoryview = b"",
    ) -> None:
        """Queue a frame; does nothing if the link has ended. Await `wait_writable` before sending large payloads."""
        if not self._ended:
            self.send_encoded(encode(kind, number, body, payload))

    def send_encoded(self, data: bytes | bytearray) -> None:
        """As `send`, for a frame that is already encoded. A `bytearray` belongs to the link from now on."""
        if self._ended:
            return
        self._queue.append(data)
        self._queued_bytes += len(data)
        if self._queued_bytes > _MAX_UNSENT_BYTES:
            self._writable.clear()
            if self._queued_bytes > _MAX_BACKLOG_BYTES:
                self.fail(f"the other end did not read {self._queued_bytes} bytes")
        if not self._sending:  # with the frames that are queued until then
            self._sending = True
            asyncio.get_running_loop().call_soon(self._send_next)

    async def wait_writable(self) -> None:
        """Wait until the queue is short enough, or the link has ended."""
        while not self._writable.is_set() and not self._ended:  # other waiters may have filled the queue again
            await self._writable.wait()

    async def run(self) -> BrokenWorldException | WorldClosedError:
        """Receive frames until the link ends; returns why it ended."""
        try:
            while True:
                message = await self._channel.receive()
                assert message.payload is not None
                for frame in decode(message.payload.numpy().data.cast("B")):
                    self._on_frame(frame)
        except (BrokenWorldException, WorldClosedError) as ending:
            return ending
        except ValueError as error:
            detail = f"invalid frame ({type(error).__name__}: {error!s:.200})"
            self.fail(detail)
            return BrokenWorldException(self.world.name, Cause.ERROR, 1 - self.world.rank, detail)
        finally:
            self.end()

    def fail(self, detail: str) -> None:
        """Break the world."""
        self.world.fail(Cause.ERROR, 1 - self.world.rank, detail)
        self.end()

    def end(self) -> None:
        """Send nothing more."""
        self._ended = True
        self._queue.clear()
        self._writable.set()

    def _send_next(self, _sent: object = None) -> None:
        """Send queued frames in one message. Called again when it is sent, until the queue is empty."""
        self._sending = False
        if self._queue:
            payload = torch.frombuffer(self._next_message(), dtype=torch.uint8)
            try:
                operation = self._channel.start(Message(MessageKind.FRAMES, payload=payload))
            except (BrokenWorldException, WorldClosedError):
                self.end()  # `run` reports it
                return
            self._sending = True
            operation.add_done_callback(self._send_next)

    def _next_message(self) -> bytearray:
        """Take queued frames until the message is large enough."""
        first, count = self._queue[0], 1
        data = first if isinstance(first, bytearray) else bytearray(first)
        while count < len(self._queue) and len(data) < _MESSAGE_BYTES:
            data += self._queue[count]
            count += 1
        del self._queue[:count]
        self._queued_bytes -= len(data)
        if self._queued_bytes <= _MAX_UNSENT_BYTES:
            self._writable.set()
        return data


def _check(header: Header) -> None:
    if header.kind is not MessageKind.FRAMES:
        raise WireError(f"unexpected {header.kind.name} between frontend and leader")
    header.require_batch(torch.uint8, (), 1, MAX_BYTES + (1 << 20))
