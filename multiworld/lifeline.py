"""One TCP connection between two processes, over which a world forms, beats and says goodbye. Never blocks.

A lifeline lives on the watchdog's thread: nothing here may be called from another one.
"""

import contextlib
import selectors
import socket
from typing import TYPE_CHECKING, Protocol

from multiworld.frames import MAX_FRAME_BYTES, MAX_HANDSHAKE_BYTES, Frame, FrameError, FrameReader

if TYPE_CHECKING:
    from multiworld.watchdog import WatchDog

_RECEIVE_BYTES = 1 << 16
_MAX_OUTBOX_BYTES = 4 * MAX_FRAME_BYTES
"""A peer that reads nothing may owe us this much; then it counts as lost."""
_FLUSH_S = 1.0
"""How long a closing lifeline goes on sending what is left."""


class LifelineOwner(Protocol):
    """Who is told what happens on a lifeline."""

    def on_frame(self, lifeline: "Lifeline", frame: Frame) -> None:
        """A frame came. An error raised here closes the lifeline."""

    def on_lost(self, lifeline: "Lifeline", reason: str) -> None:
        """The connection ended from the other side, or spoke garbage. Called once, never after `close`."""


class Lifeline:
    def __init__(self, watchdog: "WatchDog", sock: socket.socket, owner: LifelineOwner) -> None:
        self.owner = owner
        self.last_heard_s = watchdog.now_s
        self.local_host: str = sock.getsockname()[0]
        self.peer_host: str = sock.getpeername()[0]
        self._watchdog = watchdog
        self._sock = sock
        self._reader = FrameReader(MAX_HANDSHAKE_BYTES)
        self._outbox = bytearray()
        self._open = True
        self._closing = False
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        watchdog.lifelines.add(self)
        watchdog.register(sock, selectors.EVENT_READ, self._on_event)

    def trust(self) -> None:
        """The other side has proven itself: allow long frames."""
        self._reader.limit_bytes = MAX_FRAME_BYTES

    def send(self, data: bytes) -> None:
        """Send now what the kernel takes and keep the rest; a peer that takes nothing for too long is lost."""
        if not self._open or self._closing:
            return
        self._outbox += data
        self._flush()
        if len(self._outbox) > _MAX_OUTBOX_BYTES:
            self._lose("it reads nothing that we send")

    def close(self) -> None:
        """Send what is left, for a second at the most, then end the connection. The owner hears no more of it."""
        if not self._open or self._closing:
            return
        self._closing = True
        if self._outbox:
            self._watchdog.call_later(_FLUSH_S, self._end)
        else:
            self._end()

    def hand_over(self) -> socket.socket:
        """Give the connection away, for something else than frames. Raises FrameError when more has come or has still to go."""
        if not self._open or self._outbox or self._reader.holds_part:
            raise FrameError("more than a handshake on a connection for messages")
        self._open = False
        self._watchdog.lifelines.discard(self)
        self._watchdog.unregister(self._sock)
        return self._sock

    def _on_event(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE and self._open:
            self._flush()
        if mask & selectors.EVENT_READ and self._open:
            self._receive()

    def _receive(self) -> None:
        try:
            data = self._sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(error.strerror or str(error))
            return
        if not data:
            self._lose("it ended the connection")
            return
        self.last_heard_s = self._watchdog.now_s
        if self._closing:
            return
        try:
            for frame in self._reader.feed(data):
                self.owner.on_frame(self, frame)
                if not self._open or self._closing:
                    return
        except FrameError as error:
            self._lose(f"it sent garbage: {error}")
        except Exception:
            self._lose("what it sent could not be handled")
            raise

    def _flush(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: self._sock.send(self._outbox)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._outbox.clear()
            if self._closing:
                self._end()
            # Otherwise what the peer said last may still lie unread: leave it to `_receive` to find the end.
            elif error.errno is None:  # pragma: no cover - every OSError of a socket has one
                raise
        if self._open:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
            self._watchdog.modify(self._sock, wanted, self._on_event)
            if self._closing and not self._outbox:
                self._end()

    def _lose(self, reason: str) -> None:
        if not self._open:
            return
        closing = self._closing
        self._end()
        if not closing:
            self.owner.on_lost(self, reason)

    def _end(self) -> None:
        if not self._open:
            return
        self._open = False
        self._watchdog.lifelines.discard(self)
        self._watchdog.unregister(self._sock)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        self._sock.close()
