"""The connection between the leader and one frontend: ordered frames in both directions over a Unix socket.

A frame is a header of fixed length, a JSON object, and a payload that is read directly into its own buffer.
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
_READ_BUFFER_BYTES = 1 << 16
_ALIGNED_BYTES = 8
"""Payloads start at a multiple of this, so that tensors in them are aligned."""
MAX_BYTES = 1 << 27
"""Maximum size of one frame. The largest image, 4096 x 4096 pixels, has 48 MiB."""


_MAX_UNSENT_BYTES = 1 << 22
"""Bytes queued for sending above which `FrameConnection.wait_writable` waits."""

_MAX_BACKLOG_BYTES = 2 * MAX_BYTES
"""Bytes queued for sending above which the connection is closed: some senders do not wait."""


class FrameKind(IntEnum):
    """What a frame contains. A reply has the same number as its request."""

    HELLO = 1
    """Frontend to leader, first frame: the frontend's name."""
    WELCOME = 2
    """Leader to frontend: settings and model."""
    STATE = 3
    """Leader to frontend: the current version, and why requests are rejected, if they are."""
    CHECK = 4
    """Frontend to leader: would a request be rejected? Reply: ADMITTED or REFUSED."""
    ADMITTED = 5
    PREDICT = 6
    """Frontend to leader: an image. Reply: PREDICTION or REFUSED."""
    PREDICTION = 7
    REFUSED = 8
    CANCEL = 9
    """Frontend to leader: the prediction is not needed any more."""
    REQUEST_STARTED = 10
    """Frontend to leader: a client's request started."""
    REQUEST_ENDED = 11
    CONNECTION_COUNT = 12
    """Frontend to leader: its number of open connections."""
    CONNECTION_CLOSED = 13
    """Frontend to leader: it closed a connection because of its client."""
    QUIESCE = 14
    """Leader to frontend: reply DONE when no request is in flight."""
    PREPARE_CREDENTIALS = 15
    """Leader to frontend: load and validate these keys and certificates without using them. Reply: DONE."""
    DONE = 16
    """Frontend to leader: completed the leader's request, or the error."""
    PING = 17
    PONG = 18
    REQUEST = 19
    """Frontend to leader: a forwarded HTTP request. Replies: RESPONSE parts, each confirmed with ACK, then END."""
    RESPONSE = 20
    ACK = 21
    END = 22
    DISCONNECTED = 23
    """Frontend to leader: the client of a REQUEST disconnected."""
    SERVING = 24
    """Frontend to leader: it serves clients from now on."""
    APPLY_CREDENTIALS = 25
    """Leader to frontend: use the prepared keys and certificates. Reply: DONE."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One received frame.

    Attributes:
        payload: writable; not shared.
    """

    kind: FrameKind
    number: int
    fields: Mapping[str, Any]
    payload: memoryview


class FrameConnection(asyncio.BufferedProtocol):
    """One end of the connection. An invalid frame closes it.

    Args:
        on_frame: called with each frame. Raises ValueError, KeyError or TypeError if the frame is invalid, and nothing else.
        on_lost: called once after the connection has closed.
    """

    def __init__(self, on_frame: Callable[[Frame], None], on_lost: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._outbox: list[bytes | memoryview] = []
        self._outbox_bytes = 0
        self._paused = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._read_buffer = bytearray(_READ_BUFFER_BYTES)
        self._held = 0  # bytes of an incomplete header in the read buffer
        self._current: tuple[FrameKind, int, int] = (FrameKind.HELLO, 0, 0)
        self._body: bytearray | None = None  # of the frame being received, unless the read buffer contained all of it
        self._filled = 0

    def send(
        self,
        kind: FrameKind,
        number: int = 0,
        fields: Mapping[str, Any] | None = None,
        payload: bytes | memoryview = b"",
    ) -> None:
        """Queue a frame; does nothing if the connection is closed. The payload must not change afterwards.

        Frames queued in one iteration of the event loop, such as a batch of predictions, are sent with one system call.
        Await `wait_writable` before sending large payloads.
        """
        if self._transport is None or self._transport.is_closing():
            return
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        text = json.dumps(fields).encode() if fields else b""
        text += b" " * (-len(text) % _ALIGNED_BYTES)
        self._outbox.append(_HEAD.pack(kind, number, len(text), len(payload)) + text)
        if payload:
            self._outbox.append(payload)
        self._outbox_bytes += _HEAD.size + len(text) + len(payload)
        self._update_writable()

    async def wait_writable(self) -> None:
        """Wait until the queue is short enough, or the connection is closed."""
        while not self._writable.is_set():  # other waiters may have filled the queue again
            await self._writable.wait()

    def close(self) -> None:
        """Close the connection immediately; queued frames may be lost."""
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        outbox, self._outbox, self._outbox_bytes = self._outbox, [], 0
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(outbox)
            if self._paused and self._transport.get_write_buffer_size() > _MAX_BACKLOG_BYTES:
                logger.error("closing the connection: the other end did not read %d bytes", _MAX_BACKLOG_BYTES)
                self.close()
        self._update_writable()

    def _update_writable(self) -> None:
        if self._transport is None or not (self._paused or self._outbox_bytes > _MAX_UNSENT_BYTES):
            self._writable.set()
        else:
            self._writable.clear()

    # -- called by the event loop ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(_MAX_UNSENT_BYTES)

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._paused = True
        self._update_writable()

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._paused = False
        self._update_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = None
        self._update_writable()
        self._on_lost()

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`."""
        if self._body is not None:
            return memoryview(self._body)[self._filled :]
        return memoryview(self._read_buffer)[self._held :]

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        try:
            if self._body is None:
                self._parse(self._held + nbytes)
                return
            self._filled += nbytes
            if self._filled == len(self._body):
                body, self._body = self._body, None
                self._deliver(body)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("closing the connection: invalid frame (%s: %.200s)", type(error).__name__, error)
            self.close()

    def _parse(self, end: int) -> None:
        """Parse the frames in the read buffer, which is filled up to `end`."""
        at = 0
        while end - at >= _HEAD.size:
            kind, number, text_bytes, payload_bytes = _HEAD.unpack_from(self._read_buffer, at)
            at += _HEAD.size
            size = text_bytes + payload_bytes
            if size > MAX_BYTES:
                raise ValueError(f"a frame of {size} bytes exceeds the limit of {MAX_BYTES}")
            self._current = (FrameKind(kind), number, text_bytes)
            body = bytearray(size)
            here = min(size, end - at)
            body[:here] = memoryview(self._read_buffer)[at : at + here]
            at += here
            if here < size:
                self._body, self._filled = body, here
            else:
                self._deliver(body)
        self._held = end - at
        self._read_buffer[: self._held] = self._read_buffer[at:end]

    def _deliver(self, body: bytearray) -> None:
        kind, number, text_bytes = self._current
        whole = memoryview(body)
        fields = json.loads(bytes(whole[:text_bytes])) if text_bytes else {}
        self._on_frame(Frame(kind, number, fields, whole[text_bytes:]))
