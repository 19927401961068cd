"""A connection between two members of a world that carries messages in both directions through a socket. No method blocks.

Flow control uses receive credits: a receiver announces that it waits for a message with a given tag, and the sender writes a message only
after this announcement. Data is written from the memory of the sent tensor and read into the memory of the receiving tensor, without a
copy between them. A receiver therefore buffers no messages, a pending tag does not delay other tags, and both members can send first
because a connection with pending sends continues to read.
"""

import contextlib
import logging
import select
import socket
import threading
import time
from collections import deque
from itertools import islice
from typing import Protocol

from multiworld.errors import Cause
from multiworld.execution.failures import ConnectionLostError, described
from multiworld.ops.operation import Message
from multiworld.transport.poller import Poller
from multiworld.transport.queues import MessageQueues
from multiworld.transport.tcp import is_unacknowledged, prepare
from multiworld.transport.wire import HEAD, MESSAGE, RECV_READY, Output, credit_head

logger = logging.getLogger(__name__)

Announced = tuple[int, int, bytes]
"""Tag, size in bytes, and signature of a message that a frame announces."""

_SCRATCH_BYTES = 1 << 13
"""Size of the buffer for heads, in bytes. A short message is read together with its head."""
_EVENT_BYTES = 1 << 20
"""Bytes that a connection reads or writes before the event loop serves the next connection."""
SENDMSG_BUFFERS = 16
"""Maximum number of buffers for one call of `sendmsg`."""


class ConnectionOwner(Protocol):
    """Receives the results of messages. All methods are called under the world's lock."""

    def on_transferred(self, operation: Message) -> None:
        """A sent message is completely in the kernel's buffer, or a message was completely received. May use the connection."""

    def on_connection_lost(self, peer: int, pending: list[Message], reason: str) -> None:
        """The connection failed while these messages were pending."""

    def on_error(self, peer: int, cause: Cause, detail: str) -> None:
        """The world must break. ERROR: the peer violated the protocol, or its message does not match the receive.

        LOCAL: this member failed to handle the received data, for example because memory is short.
        """


class SocketPayloads:
    """Carries the bytes of messages through the socket, each after its head. `SharedPayloads` carries them in other ways.

    Attributes:
        waiting: the first output of the connection waits for the peer, not for the socket.
        incoming: the message that arrives otherwise than through the socket, piece by piece.
    """

    waiting = False
    incoming: Message | None = None

    def enqueue(self, connection: "PeerConnection", message: Message) -> None:
        """Queue the outputs of a message."""
        if message.memory:
            connection.outbox.append(Output(message.head, joined=True))
            connection.outbox.append(Output(message.memory, message))
        else:
            connection.outbox.append(Output(message.head, message))

    def write(self, connection: "PeerConnection") -> int:
        """Write the first outputs. Returns how many bytes. Raises BlockingIOError when they have to wait."""
        return connection.sock.sendmsg([output.data for output in islice(connection.outbox, SENDMSG_BUFFERS)])

    def receive_into(self, sock: socket.socket, buffers: list[memoryview]) -> int:
        """Read from the socket. Returns how many bytes. Raises ValueError if the peer violates the protocol."""
        return sock.recvmsg_into(buffers)[0]

    def on_frame(self, connection: "PeerConnection", kind: int, announced: Announced, lease: int, offset: int) -> None:
        """Handle a frame that is neither a credit nor a message. Raises ValueError if it is invalid."""
        raise ValueError(f"it sent invalid data: a head of kind {kind}")

    def stop(self) -> list[Message]:
        """Free everything after the end. Returns the messages that were pending and are in no queue of the connection."""
        return []


class PeerConnection:
    """This member's end of the connection to `peer`. Call its methods under the world's lock, except `on_event` and `queue_frame`.

    Attributes:
        end_reason: why the connection ended; None while it is usable.
        sock, owner, queues, outbox: for `payloads`.

    Args:
        payloads: how the bytes of messages travel.
    """

    def __init__(
        self,
        peer: int,
        sock: socket.socket,
        lock: threading.RLock,
        owner: ConnectionOwner,
        poller: Poller,
        payloads: SocketPayloads,
    ) -> None:
        self.peer = peer
        self.end_reason: str | None = None
        self.sock = sock
        self.owner = owner
        self.outbox: deque[Output] = deque()
        self._payloads = payloads
        self._lock = lock
        self._poller = poller
        self._mask = select.EPOLLIN
        self._claimed = False  # a thread that waits for a message reads the socket
        self._on_demand = False  # polled for input only while a message is pending; after the first claim
        self.queues = MessageQueues()
        self._queued: deque[bytes] = deque()  # frames of `queue_frame`
        # Part of the first output, or its head, is already written: nothing may be inserted before it.
        self._partly_written = False
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._scratch_view = memoryview(self._scratch)
        self._head_bytes = 0  # bytes of an incomplete head in the scratch buffer
        self._reading = False
        self._incoming: Message | None = None
        self._filled = 0
        sock.setblocking(False)
        prepare(sock)
        poller.register(sock.fileno(), self.on_event, self._mask)

    # -- messages ------------------------------------------------------------------------------------------------------------

    def receive(self, message: Message) -> None:
        """Receive the next message with this tag. Raises ConnectionLostError when the connection has ended."""
        self._raise_if_ended()
        self.queues.add_receive(message)
        self.write_first(credit_head(message.tag))

    def send(self, message: Message) -> None:
        """Queue a message; it is written when the peer has granted a credit and `message.data` is set. Errors as in `receive`."""
        self._raise_if_ended()
        self.queues.add_send(message)
        if message.data is not None and not self.queues.has_credit(message.tag):
            self._read()  # a credit may have arrived already
        self.send_ready(message.tag)

    def send_ready(self, tag: int) -> None:
        """Write the queued messages with this tag that have a credit and their data."""
        while (message := self.queues.pop_ready(tag)) is not None:
            self._payloads.enqueue(self, message)
        self.flush()

    def claim(self) -> bool:
        """Let this thread read the socket, not the event loop, until `release`. Returns False if another thread does, or after the end.

        From then on, input is polled only while a message is pending: a credit between two messages, which `send` reads, would wake the
        event loop, whose thread would compete for the GIL.
        """
        with self._lock:
            if self._claimed or self.end_reason is not None:
                return False
            self._claimed = self._on_demand = True
            self._poll()
            return True

    def release(self) -> None:
        """Let the event loop read the socket."""
        with self._lock:
            self._claimed = False
            self._poll()

    def move(self, poller: Poller) -> None:
        """Move the connection to the poller of another event loop."""
        if self.end_reason is None:
            self._poller.unregister(self.sock.fileno())
            self._poller = poller
            poller.register(self.sock.fileno(), self.on_event, self._mask)
            poller.call_soon(self._write_queued)

    def queue_frame(self, frame: bytes) -> None:
        """Write a frame soon. May be called by the garbage collector, on any thread and at any point, so it takes no lock."""
        self._queued.append(frame)
        self._poller.call_soon(self._write_queued)

    def _write_queued(self) -> None:
        """Write the queued frames, if no message has taken them along."""
        with self._lock:
            if self._queued and self.end_reason is None:
                self.flush()

    def half_close(self) -> None:
        """Write and read nothing more, but keep the socket open: the peer can still read what is written. The owner is not called.

        If the socket were closed while received data is unread, the kernel would discard what the peer has not read yet.
        """
        if self.end_reason is None:
            self.end_reason = "closed"
            self._stop()
            with contextlib.suppress(OSError):  # the peer has closed it
                self.sock.shutdown(socket.SHUT_WR)

    def await_end(self, until_s: float) -> None:
        """After `half_close`: wait until the peer has closed its end, at most until `until_s` by `time.monotonic`. Reads and discards."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: `until_s` has passed
            while self.sock.fileno() >= 0:
                self.sock.settimeout(until_s - time.monotonic())
                if not self.sock.recv(_SCRATCH_BYTES):
                    return

    def is_unacknowledged(self) -> bool:
        """Return whether the host of the peer does not acknowledge what was sent to it. Takes no lock."""
        return self.end_reason is None and is_unacknowledged(self.sock)

    def close(self) -> None:
        """Close the connection. The owner is not called."""
        if self.end_reason is None:
            self.end_reason = "closed"
            self._stop()
        self.sock.close()

    # -- event loop --------------------------------------------------------------------------------------------------------------

    def on_event(self, mask: int) -> None:
        """Read or write what is possible. Called by the poller when the socket is ready. Takes the world's lock; does not raise."""
        try:
            with self._lock:
                if self.end_reason is None and mask & ~select.EPOLLOUT:
                    self._read()
                if self.end_reason is None and mask & select.EPOLLOUT:
                    self.flush()
        except Exception as error:  # without this the poller would call again forever
            with self._lock:
                self._break(f"reading from rank {self.peer}: {described(error)}", Cause.LOCAL)
            logger.exception("the connection to rank %d failed", self.peer)

    # -- reading -----------------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        if self._reading:  # the owner used the connection from `on_transferred`: the outer call continues to read
            return
        self._reading = True
        try:
            remaining = _EVENT_BYTES
            while remaining > 0 and self.end_reason is None:
                buffers = self._read_buffers(remaining)
                try:
                    count = self._payloads.receive_into(self.sock, buffers)
                except BlockingIOError:
                    return
                except OSError as error:
                    self._fail(error.strerror or str(error))
                    return
                if not count:
                    self._fail("the peer closed the connection")
                    return
                self._on_received(count)
                if count < sum(map(len, buffers)):
                    return
                remaining -= count
        except ValueError as error:
            self._break(str(error))
        finally:
            self._reading = False

    def _read_buffers(self, limit: int) -> list[memoryview]:
        """Buffers for the next read: the rest of the current message, then the scratch buffer."""
        if self._incoming is None:
            return [self._scratch_view[self._head_bytes :]]
        rest = self._incoming.memory[self._filled :]
        return [rest[:limit]] if len(rest) > limit else [rest, self._scratch_view]

    def _on_received(self, count: int) -> None:
        """Handle `count` received bytes. Raises ValueError when the peer violates the protocol."""
        message = self._incoming
        if message is not None:
            taken = min(count, len(message.memory) - self._filled)
            self._filled += taken
            count -= taken
            if self._filled < len(message.memory):
                return
            self._incoming = None
            self.owner.on_transferred(message)
        at, end = 0, self._head_bytes + count
        while self.end_reason is None and self._incoming is None and end - at >= HEAD.size:
            kind, tag, size, signature, lease, offset = HEAD.unpack_from(self._scratch, at)
            at += HEAD.size
            if kind == RECV_READY:
                if self.queues.grant(tag):
                    self.send_ready(tag)
            elif kind == MESSAGE:
                at += self._start_message(tag, size, signature, self._scratch_view[at:end])
            else:
                self._payloads.on_frame(self, kind, (tag, size, signature), lease, offset)
        self._head_bytes = end - at if self.end_reason is None else 0
        if self._head_bytes and at:
            self._scratch_view[: self._head_bytes] = self._scratch_view[at:end]

    def _start_message(self, tag: int, size: int, signature: bytes, following: memoryview) -> int:
        """Start to receive a message. `following` has the bytes read after its head. Returns how many of them belong to the message."""
        message = self.queues.match(tag, size, signature)
        taken = min(size, len(following))
        if taken:
            message.memory[:taken] = following[:taken]
        if taken == size:
            self.owner.on_transferred(message)
        else:
            self._incoming, self._filled = message, taken
        return taken

    # -- writing -----------------------------------------------------------------------------------------------------------------

    def write_first(self, frame: bytes) -> None:
        """Write a frame before the messages that are not partly written: they may be long, and their order relative to it is irrelevant."""
        self._insert_first(frame)
        self.flush()

    def _insert_first(self, frame: bytes) -> None:
        # A partly written head must be followed by its message.
        at = self._partly_written + (self._partly_written and self.outbox[0].joined)
        self.outbox.insert(at, Output(frame))

    def flush(self) -> None:
        """Write what the kernel accepts now."""
        while self._queued:
            self._insert_first(self._queued.popleft())
        remaining, outbox = _EVENT_BYTES, self.outbox
        while outbox and remaining > 0:
            try:
                sent = self._payloads.write(self)
            except BlockingIOError:
                break
            except OSError as error:
                self._fail(error.strerror or str(error))
                return
            remaining -= sent
            completed = []
            while sent and sent >= len(outbox[0].data):
                output = outbox.popleft()
                self._partly_written = output.joined
                sent -= len(output.data)
                if output.message is not None:
                    completed.append(output.message)
            if sent:
                output = outbox[0]
                outbox[0] = Output(memoryview(output.data)[sent:], output.message, output.joined)
                self._partly_written = True
            for message in completed:  # after the outbox is updated, because the owner may send more
                self.owner.on_transferred(message)
        self._poll()

    def _poll(self) -> None:
        """Let the event loop poll the socket for what this connection waits for now."""
        pending = self.outbox or self._incoming or self._payloads.incoming or self.queues.pending
        idle = self._on_demand and (self._claimed or not pending)
        mask = 0 if idle else select.EPOLLIN
        if self.outbox and not self._payloads.waiting:
            mask |= select.EPOLLOUT
        if mask != self._mask and self.end_reason is None:
            self._mask = mask
            self._poller.modify(self.sock.fileno(), mask)

    # -- failing -----------------------------------------------------------------------------------------------------------------

    def _raise_if_ended(self) -> None:
        if self.end_reason is not None:
            raise ConnectionLostError(self.end_reason, self.peer)

    def _break(self, detail: str, cause: Cause = Cause.ERROR) -> None:
        """The peer violated the protocol, or (LOCAL) this member failed. The owner breaks the world, which fails all pending operations.

        Nothing is read any more. The socket stays open until the world closes it.
        """
        if self.end_reason is None:
            self.end_reason = detail
            self._stop()
            self.owner.on_error(self.peer, cause, detail)

    def _fail(self, reason: str) -> None:
        """The connection failed. Report the pending messages to the owner and close the socket."""
        if self.end_reason is None:
            self.end_reason = reason
            self.owner.on_connection_lost(self.peer, self._stop(), reason)
            self.sock.close()

    def _stop(self) -> list[Message]:
        """Stop polling and drop all messages, but keep the socket open. Returns the pending messages."""
        self._poller.unregister(self.sock.fileno())
        pending = [self._incoming] if self._incoming is not None else []
        pending += self.queues.clear()
        pending += [output.message for output in self.outbox if output.message is not None]
        pending += self._payloads.stop()
        self._incoming = None
        self.outbox.clear()
        return pending
