"""The connection between the leader and one of its frontends: frames both ways, over a Unix socket, in order.

A frame is a head of fixed length, a JSON object, and a payload that is read straight into memory of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("!BQII")
"""Kind, number, bytes of JSON, bytes of payload."""
_SCRATCH_BYTES = 1 << 16
_ALIGNED_BYTES = 8
"""Numbers in a payload lie where the processor wants them."""
MAX_BYTES = 1 << 27
"""Of one frame. An image of 4096 x 4096 pixels, the largest there is, has 48 MiB."""


class Kind(IntEnum):
    """What a frame is about. Its number tells questions apart; the other side's answer has the same."""

    HERE = 1
    """From the frontend, first of all: its name."""
    WELCOME = 2
    """From the leader: settings and model."""
    STATE = 3
    """From the leader: the version that serves, and why requests are refused, if they are."""
    CHECK = 4
    """Would a request be refused? FINE or REFUSED."""
    FINE = 5
    PREDICT = 6
    """An image. ANSWER or REFUSED."""
    ANSWER = 7
    REFUSED = 8
    CANCEL = 9
    """Nobody waits for that answer any more."""
    BEGAN = 10
    """A request of a client has begun at a frontend."""
    ENDED = 11
    CONNECTIONS = 12
    """So many the frontend has."""
    CLOSED = 13
    """It closed one for what its client did."""
    SETTLE = 14
    """From the leader: say when nothing is under way. DONE."""
    RENEW = 15
    """From the leader: read keys and certificates anew. DONE."""
    DONE = 16
    PING = 17
    PONG = 18
    REQUEST = 19
    """A request that the leader is to answer. Parts of RESPONSE, each of which is TAKEN before the next one comes; then OVER."""
    RESPONSE = 20
    TAKEN = 21
    OVER = 22
    GONE = 23
    """The client of a REQUEST has gone."""
    SERVES = 24
    """From the frontend: it answers clients from now on."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame as it came.

    Attributes:
        payload: writable, and nobody else's.
    """

    kind: Kind
    number: int
    facts: Mapping[str, Any]
    payload: memoryview


class FrameLink(asyncio.BufferedProtocol):
    """One end. What it says of its frames must not raise anything but for nonsense, upon which the connection ends.

    Args:
        on_frame: told of each frame. Raises ValueError, KeyError or TypeError where it makes no sense.
        on_lost: told once that the connection has ended.
    """

    def __init__(self, on_frame: Callable[[Frame], None], on_lost: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._outbox: list[bytes | memoryview] = []
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._held = 0  # bytes in scratch of a head that is not whole
        self._coming: tuple[Kind, int, int] = (Kind.HERE, 0, 0)
        self._body: bytearray | None = None  # of the frame that is coming, unless scratch had all of it
        self._filled = 0

    def send(
        self, kind: Kind, number: int = 0, facts: Mapping[str, Any] | None = None, payload: bytes | memoryview = b""
    ) -> None:
        """Send a frame; nothing happens when the connection has ended. The payload must stay as it is.

        What is sent in one turn of the event loop, as the answers of a batch are, takes one system call together.
        """
        if self._transport is None or self._transport.is_closing():
            return
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        text = json.dumps(facts).encode() if facts else b""
        text += b" " * (-len(text) % _ALIGNED_BYTES)
        self._outbox.append(_HEAD.pack(kind, number, len(text), len(payload)) + text)
        if payload:
            self._outbox.append(payload)

    def close(self) -> None:
        """End the connection, at once: what was sent and not read may be lost."""
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(outbox)

    # -- from the event loop ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = None
        self._on_lost()

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`."""
        if self._body is not None:
            return memoryview(self._body)[self._filled :]
        return memoryview(self._scratch)[self._held :]

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        try:
            if self._body is None:
                self._understand(self._held + nbytes)
                return
            self._filled += nbytes
            if self._filled == len(self._body):
                body, self._body = self._body, None
                self._deliver(body)
        except (ValueError, KeyError, TypeError) as error:
            logger.exception("a frame made no sense: the connection ends (%s)", type(error).__name__)
            self.close()

    def _understand(self, end: int) -> None:
        """Take the frames of which scratch has the beginning, up to `end`."""
        at = 0
        while end - at >= _HEAD.size:
            kind, number, text_bytes, payload_bytes = _HEAD.unpack_from(self._scratch, at)
            at += _HEAD.size
            size = text_bytes + payload_bytes
            if size > MAX_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            self._coming = (Kind(kind), number, text_bytes)
            body = bytearray(size)
            here = min(size, end - at)
            body[:here] = memoryview(self._scratch)[at : at + here]
            at += here
            if here < size:
                self._body, self._filled = body, here
            else:
                self._deliver(body)
        self._held = end - at
        self._scratch[: self._held] = self._scratch[at:end]

    def _deliver(self, body: bytearray) -> None:
        kind, number, text_bytes = self._coming
        whole = memoryview(body)
        facts = json.loads(bytes(whole[:text_bytes])) if text_bytes else {}
        self._on_frame(Frame(kind, number, facts, whole[text_bytes:]))
