"""A TCP connection between two members of a world that carries messages in both directions. No method blocks.

Flow control is by receive credits: a receiver announces that it waits for a message with a given tag, and the sender writes a message
only after this announcement. Data is written from the memory of the sent tensor and read into the memory of the receiving tensor,
without a copy between them. A receiver therefore buffers no messages, a pending tag does not delay other tags, and both members can send
first because a connection with pending sends continues to read.

On the wire, each frame is a head of fixed length (`HEAD`). The head of a message is followed by the bytes of the message.
"""

import ctypes
import functools
import logging
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from torch import Tensor

from multiworld.execution.failures import ConnectionLostError
from multiworld.ops.operation import Operation, Part
from multiworld.transport.poller import Poller

logger = logging.getLogger(__name__)

HEAD = struct.Struct("!B3xIQ48s")
"""Kind, tag, number of bytes that follow, and the signature of the message."""
POSTED = 1
"""Kind of a head that grants one receive credit: the receiver waits for one message with this tag."""
MESSAGE = 2
"""Kind of a head that is followed by the bytes of a message."""
MAX_POSTED = 1 << 18
"""Maximum number of receive credits that a peer may have granted and that are not used yet, over all tags."""

_SIGNATURE_BYTES = 48
_SCRATCH_BYTES = 1 << 13
"""Size of the buffer for heads, in bytes. A short message is read together with its head."""
_TURN_BYTES = 1 << 20
"""Bytes that a connection reads or writes before the event loop serves the next connection."""
_BUFFERS_AT_ONCE = 16
"""Maximum number of buffers for one call of `sendmsg`."""


class ConnectionOwner(Protocol):
    """Receives the results of transfers. All methods are called under the world's lock."""

    def on_carried(self, freight: Operation | Part) -> None:
        """A sent message is completely in the kernel's buffer, or a message was completely received. May use the connection."""

    def on_line_lost(self, peer: int, freights: list[Operation | Part], reason: str) -> None:
        """The connection failed while `freights` were pending."""

    def on_line_nonsense(self, peer: int, detail: str) -> None:
        """The peer violated the protocol, or its message does not match the receive. The world must break."""

    def on_line_error(self, peer: int, error: Exception) -> None:
        """This member failed to handle the received data, for example because memory is short. The world must break."""


@dataclass(slots=True, eq=False)
class Transfer:
    """A message that this member sends or receives.

    Attributes:
        freight: the operation, or part of a collective, that completes with this transfer.
        head: for a send, the complete head; for a receive, the expected signature as encoded by `sealed`.
        memory: bytes of the sent or receiving tensor; keeps the tensor alive. None while the data is being copied from a device.
        accept: for a receive without memory, returns it when a head has arrived; see multiworld/ops/messages.py.
    """

    freight: Operation | Part
    head: bytes
    memory: memoryview | None = None
    accept: Callable[[bytes, int], Tensor] | None = None

    def put(self, data: Tensor) -> None:
        """Use the memory of `data`, a contiguous tensor on the host."""
        self.memory = memory_of(data)


class PeerConnection:
    """This member's end of the connection to `peer`. Every method except `on_event` must be called under the world's lock.

    Attributes:
        lost: why the connection ended; None while it is usable.
    """

    def __init__(
        self, peer: int, sock: socket.socket, lock: threading.RLock, owner: ConnectionOwner, board: Poller
    ) -> None:
        self.peer = peer
        self.lost: str | None = None
        self._sock = sock
        self._lock = lock
        self._owner = owner
        self._board = board
        self._mask = select.EPOLLIN
        self._receives: dict[int, deque[Transfer]] = {}
        self._sends: dict[int, deque[Transfer]] = {}
        self._wanted: dict[int, int] = {}  # tag → receive credits from the peer
        self._wanted_total = 0
        # Bytes, what completes when they are written, and whether the next entry must follow directly (a head and its message).
        self._outbox: deque[tuple[bytes | memoryview, Operation | Part | None, bool]] = deque()
        self._begun = (
            False  # part of the first outbox entry, or its head, is already written: nothing may be inserted before it
        )
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._scratch_view = memoryview(self._scratch)
        self._held = 0  # bytes of an incomplete head in the scratch buffer
        self._reading = False
        self._incoming: Transfer | None = None
        self._filled = 0
        sock.setblocking(False)
        board.plug(sock.fileno(), self, self._mask)

    # -- messages ------------------------------------------------------------------------------------------------------------

    def receive(self, letter: Transfer, tag: int) -> None:
        """Receive the next message with this tag. Raises ConnectionLostError when the connection has ended."""
        self._raise_if_lost()
        self._receives.setdefault(tag, deque()).append(letter)
        # Credits go before messages that are not partly written: messages may be long, and their order relative to credits is irrelevant.
        at = int(self._begun)
        if at and self._outbox[0][2]:  # a partly written head, which its message must follow
            at += 1
        self._outbox.insert(at, (_posted(tag), None, False))
        self._flush()

    def send(self, letter: Transfer, tag: int) -> None:
        """Queue a message; it is written when the peer has granted a credit and `letter.memory` is set.

        Raises ConnectionLostError when the connection has ended.
        """
        self._raise_if_lost()
        self._sends.setdefault(tag, deque()).append(letter)
        if letter.memory is not None and tag not in self._wanted:
            self._read()  # a credit may have arrived already
        self.advance(tag)

    def advance(self, tag: int) -> None:
        """Write the queued messages with this tag that have a credit and their memory."""
        letters = self._sends.get(tag)
        while letters and tag in self._wanted and letters[0].memory is not None:
            letter = letters.popleft()
            self._want(tag, -1)
            if letter.memory:
                self._outbox.append((letter.head, None, True))
                self._outbox.append((letter.memory, letter.freight, False))
            else:
                self._outbox.append((letter.head, letter.freight, False))
        if letters is not None and not letters:
            del self._sends[tag]
        self._flush()

    def read(self) -> None:
        """Read and handle received data now, without waiting for the event loop."""
        if self.lost is None:
            self._read()

    def move(self, board: Poller) -> None:
        """Move the connection to the poller of another event loop."""
        if self.lost is None:
            self._board.unplug(self._sock.fileno())
            self._board = board
            board.plug(self._sock.fileno(), self, self._mask)

    def served_by(self) -> Poller:
        """The poller that serves this connection."""
        return self._board

    def close(self) -> None:
        """Close the connection. The owner is not called."""
        if self.lost is None:
            self.lost = "closed"
            self._end()
        self._sock.close()

    # -- event loop --------------------------------------------------------------------------------------------------------------

    def on_event(self, mask: int) -> None:
        """Called by the poller when the socket is ready. Takes the world's lock; does not raise."""
        try:
            with self._lock:
                if self.lost is None and mask & ~select.EPOLLOUT:
                    self._read()
                if self.lost is None and mask & select.EPOLLOUT:
                    self._flush()
        except Exception as error:  # without this the poller would call again forever
            with self._lock:
                self._give_up(error)
            logger.exception("the line to rank %d failed", self.peer)

    # -- internal ----------------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        if self._reading:  # the owner used the connection from `on_carried`: the outer call continues to read
            return
        self._reading = True
        try:
            self._read_turn()
        finally:
            self._reading = False

    def _read_turn(self) -> None:
        turn = _TURN_BYTES
        while turn > 0 and self.lost is None:
            views = self._room(turn)
            try:
                count = self._sock.recvmsg_into(views)[0]
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(error.strerror or str(error))
                return
            if not count:
                self._lose("it ended the connection")
                return
            self._take(count)
            if count < sum(map(len, views)):
                return
            turn -= count

    def _room(self, turn: int) -> list[memoryview]:
        """Buffers for the next read: the rest of the current message, then the scratch buffer."""
        if self._incoming is None:
            return [self._scratch_view[self._held :]]
        assert self._incoming.memory is not None
        rest = self._incoming.memory[self._filled :]
        return [rest[:turn]] if len(rest) > turn else [rest, self._scratch_view]

    def _take(self, count: int) -> None:
        """Handle `count` received bytes."""
        letter = self._incoming
        if letter is not None:
            assert letter.memory is not None
            taken = min(count, len(letter.memory) - self._filled)
            self._filled += taken
            count -= taken
            if self._filled < len(letter.memory):
                return
            self._incoming = None
            self._owner.on_carried(letter.freight)
        at, end = 0, self._held + count
        while self.lost is None and self._incoming is None and end - at >= HEAD.size:
            kind, tag, size, signature = HEAD.unpack_from(self._scratch, at)
            at += HEAD.size
            if kind == POSTED:
                self._want(tag, 1)
                if tag in self._sends:
                    self.advance(tag)
            elif kind == MESSAGE:
                at += self._begin(tag, size, signature, self._scratch_view[at:end])
            else:
                self._refuse(f"it sent garbage: a head of kind {kind}")
        self._held = end - at if self.lost is None else 0
        if self._held and at:
            self._scratch_view[: self._held] = self._scratch_view[at:end]

    def _begin(self, tag: int, size: int, signature: bytes, come: memoryview) -> int:
        """Start to receive a message. `come` holds the bytes read after its head. Returns how many of them belong to the message."""
        letters = self._receives.get(tag)
        if not letters:
            self._refuse(f"it sent a message of tag {tag} that nobody waits for")
            return 0
        letter = letters.popleft()
        if not letters:
            del self._receives[tag]
        if letter.accept is not None:
            try:
                letter.put(letter.accept(signature, size))
            except ValueError as error:
                self._refuse(str(error))
                return 0
            letter.head = signature
        memory = letter.memory
        assert memory is not None
        if size != len(memory) or signature != letter.head:
            sent, expected = _words(signature), _words(letter.head)
            letters.appendleft(letter)
            self._receives[tag] = letters
            self._refuse(f"it sent {sent} where {expected} was expected")
            return 0
        taken = min(size, len(come))
        if taken:
            memory[:taken] = come[:taken]
        if taken == size:
            self._owner.on_carried(letter.freight)
        else:
            self._incoming, self._filled = letter, taken
        return taken

    def _want(self, tag: int, more: int) -> None:
        count = self._wanted.pop(tag, 0) + more
        if count:
            self._wanted[tag] = count
        self._wanted_total += more
        if self._wanted_total > MAX_POSTED:
            self._refuse(f"it waits for over {MAX_POSTED} messages at once")

    def _flush(self) -> None:
        turn = _TURN_BYTES
        outbox = self._outbox
        while outbox and turn > 0:
            try:
                sent = self._sock.sendmsg([buffer for buffer, _, _ in islice(outbox, _BUFFERS_AT_ONCE)])
            except BlockingIOError:
                break
            except OSError as error:
                self._lose(error.strerror or str(error))
                return
            turn -= sent
            carried = []
            while outbox and sent >= len(outbox[0][0]):
                buffer, freight, self._begun = outbox.popleft()
                sent -= len(buffer)
                if freight is not None:
                    carried.append(freight)
            if sent:
                buffer, freight, goes_on = outbox[0]
                outbox[0] = memoryview(buffer)[sent:], freight, goes_on
                self._begun = True
            for freight in carried:  # after the outbox is updated, because the owner may send more
                self._owner.on_carried(freight)
        self._watch(select.EPOLLIN | select.EPOLLOUT if outbox else select.EPOLLIN)

    def _watch(self, mask: int) -> None:
        if mask != self._mask and self.lost is None:
            self._mask = mask
            self._board.modify(self._sock.fileno(), mask)

    def _raise_if_lost(self) -> None:
        if self.lost is not None:
            raise ConnectionLostError(self.lost)

    def _refuse(self, detail: str) -> None:
        """The peer violated the protocol. Stop reading; the owner breaks the world, which fails all pending operations.

        The socket stays open until the world closes it.
        """
        if self.lost is None:
            self.lost = detail
            self._owner.on_line_nonsense(self.peer, detail)
            self._end()

    def _give_up(self, error: Exception) -> None:
        """This member failed to handle an event. Stop reading; the owner breaks the world, which fails all pending operations."""
        if self.lost is None:
            self.lost = "this member could not handle what came"
            self._end()
            self._owner.on_line_error(self.peer, error)

    def _lose(self, reason: str) -> None:
        """The connection failed. Report the pending transfers to the owner and close the socket."""
        if self.lost is None:
            self.lost = reason
            self._owner.on_line_lost(self.peer, self._end(), reason)
            self._sock.close()

    def _end(self) -> list[Operation | Part]:
        """Stop polling and drop all transfers, but keep the socket open. Returns the operations and parts that were pending."""
        self._board.unplug(self._sock.fileno())
        letters = [self._incoming] if self._incoming is not None else []
        for queue in (*self._receives.values(), *self._sends.values()):
            letters += queue
        freights = [letter.freight for letter in letters]
        freights += [freight for _, freight, _ in self._outbox if freight is not None]
        self._incoming = None
        for kept in (self._receives, self._sends, self._wanted, self._outbox):
            kept.clear()
        return freights


@functools.lru_cache(256)
def sealed(signature: str) -> bytes:
    """Encode a signature to the fixed length that a head has for it."""
    assert len(signature) <= _SIGNATURE_BYTES
    return signature.encode().ljust(_SIGNATURE_BYTES, b"\0")


@functools.lru_cache(256)
def message_head(signature: str, tag: int, size_bytes: int) -> bytes:
    """The head of a message of `size_bytes` bytes."""
    return HEAD.pack(MESSAGE, tag, size_bytes, sealed(signature))


@functools.lru_cache(256)
def _posted(tag: int) -> bytes:
    """A head that grants one receive credit for `tag`."""
    return HEAD.pack(POSTED, tag, 0, b"")


def _words(signature: bytes) -> str:
    return signature.rstrip(b"\0").decode(errors="replace")


def memory_of(data: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, as a view. The view and its slices keep the tensor alive."""
    size = data.nbytes
    if not size:
        return memoryview(b"")
    array = _array(size).from_address(data.data_ptr())
    array.tensor = data  # type: ignore[attr-defined] # the memoryview keeps only the array alive
    return memoryview(array).cast("B")


@functools.lru_cache(256)
def _array(size_bytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    return ctypes.c_ubyte * size_bytes
