"""A connection between two processes for joining, heartbeats, failure reports and leave messages. Never blocks.

Use this module on the thread of the control loop only.
"""

import contextlib
import socket
from typing import Protocol

from multiworld.control.frames import MAX_FRAME_BYTES, Frame, FrameError, FrameReader
from multiworld.control.loop import ControlLoop

_RECEIVE_BYTES = 1 << 16
_MAX_OUTBOX_BYTES = 4 * MAX_FRAME_BYTES
"""Unsent bytes that are buffered for a peer that does not read. With more, the connection counts as lost."""
_MAX_CREDIT_S = 1.0
_FLUSH_S = 1.0
"""How long a closing connection tries to send buffered data."""


class StallClock:
    """Measures from a peer's heartbeats how long its event loop has not run.

    Attributes:
        stalled_s: seconds in which heartbeats arrived with an unchanged count.
    """

    def __init__(self) -> None:
        self.stalled_s = 0.0
        self._count: int | None = None
        self._received_s = 0.0

    def on_heartbeat(self, count: int, now_s: float, max_gap_s: float) -> None:
        """Record a received heartbeat.

        Args:
            max_gap_s: at most this much of the time since the previous heartbeat counts. In a longer gap the whole peer process, or this
                one, did not run; the heartbeat timeout covers that.
        """
        if count == self._count:
            self.stalled_s += min(now_s - self._received_s, max_gap_s)
        else:
            self.stalled_s = 0.0
        self._count, self._received_s = count, now_s


class ControlConnectionOwner(Protocol):
    """Receives the frames of a control connection, and its loss."""

    def on_frame(self, connection: "ControlConnection", frame: Frame) -> None:
        """Handle a received frame. If this raises, the connection is closed and `on_lost` is called."""

    def on_lost(self, connection: "ControlConnection", reason: str) -> None:
        """The peer closed the connection, the connection failed, or a frame was invalid. Called at most once, never after `close`."""


class ControlConnection:
    """Sends and receives frames on one non-blocking socket after the handshake.

    Attributes:
        last_received_s: when data last arrived, by `time.monotonic`, moved forward by `credit_stall`.
        stall_clock: how long the event loop of the peer has not run.
    """

    def __init__(self, control_loop: ControlLoop, sock: socket.socket, owner: ControlConnectionOwner) -> None:
        self.owner = owner
        self.last_received_s = control_loop.now_s
        self._credited_s = 0.0
        self.stall_clock = StallClock()
        self._control_loop = control_loop
        self._sock = sock
        self._fd = sock.fileno()  # selectors format a socket that they do not know, with two system calls each time
        self._reader = FrameReader(MAX_FRAME_BYTES)
        self._outbox = bytearray()
        self._open = True
        self._closing = False
        control_loop.connections.add(self)
        control_loop.loop.add_reader(self._fd, self._receive)

    def credit_stall(self, stalled_s: float) -> None:
        """This process did not run for `stalled_s` seconds: do not count them as silence of the peer.

        Until data arrives, the longest stall or `_MAX_CREDIT_S` is credited in total, whichever is longer. So a frozen peer is found
        although this process stalls again and again.
        """
        credit_s = min(stalled_s, max(stalled_s, _MAX_CREDIT_S) - self._credited_s)
        if credit_s > 0:
            self._credited_s += credit_s
            self.last_received_s += credit_s

    def send(self, data: bytes) -> None:
        """Send what the kernel accepts now and buffer the rest. With more than `_MAX_OUTBOX_BYTES` buffered, the connection is lost."""
        if not self._open or self._closing:
            return
        self._outbox += data
        self._flush()
        if len(self._outbox) > _MAX_OUTBOX_BYTES:
            self._fail("it does not read what we send")

    def close(self, flush_s: float = _FLUSH_S) -> None:
        """Send buffered data for at most `flush_s`, then close. The owner gets no more calls."""
        if not flush_s or not (self._outbox or self._closing):
            self._close_socket()
        elif not self._closing:
            self._control_loop.loop.call_later(flush_s, self._close_socket)
        self._closing = True

    def _receive(self) -> None:
        try:
            data = self._sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        if not data:
            self._fail("it ended the connection")
            return
        self.last_received_s = self._control_loop.now_s
        self._credited_s = 0.0
        if self._closing:
            return
        try:
            for frame in self._reader.feed(data):
                self.owner.on_frame(self, frame)
                if not self._open or self._closing:
                    return
        except FrameError as error:
            self._fail(f"it sent an invalid frame: {error}")
        except Exception:
            self._fail("its frame could not be handled")
            raise

    def _flush(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: self._sock.send(self._outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._outbox.clear()  # the peer's last frames may still be unread: `_receive` reads them and then finds the end
        if self._closing and not self._outbox:
            self._close_socket()
            return
        if self._outbox:
            self._control_loop.loop.add_writer(self._fd, self._flush)
        else:
            self._control_loop.loop.remove_writer(self._fd)

    def _fail(self, reason: str) -> None:
        if not self._open:
            return
        self._close_socket()
        if not self._closing:
            self.owner.on_lost(self, reason)

    def _close_socket(self) -> None:
        if not self._open:
            return
        self._open = False
        self._control_loop.connections.discard(self)
        self._control_loop.loop.remove_reader(self._fd)
        self._control_loop.loop.remove_writer(self._fd)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        self._sock.close()
