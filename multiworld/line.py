"""One connection between two members of a world, which carries their messages both ways. Never blocks.

A receiver says that it waits for a message of some tag; only then does the sender write it, straight from the tensor's memory, and it is
read straight into the memory that waits. So nothing piles up at a receiver, whatever its peer sends; who waits for one tag holds up no
other; and both sides may send first, for whoever sends goes on reading.

Everything on it is a head of fixed length, and behind the head of a message its bytes.
"""

import ctypes
import functools
import logging
import select
import socket
import struct
import threading
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from torch import Tensor

from multiworld.board import Board
from multiworld.operation import Operation, Part

logger = logging.getLogger(__name__)

HEAD = struct.Struct("!B3xIQ48s")
"""Kind, tag, bytes that follow, and the signature of what follows."""
POSTED = 1
"""A receive of that tag waits."""
MESSAGE = 2
MAX_POSTED = 1 << 18
"""A peer may wait for this many messages of ours at once."""

_SIGNATURE_BYTES = 48
_SCRATCH_BYTES = 1 << 13
"""What is read at once before it is known what it is: a short message comes with its head."""
_TURN_BYTES = 1 << 20
"""How much one line reads or writes before the others of its loop have their turn."""
_BUFFERS_AT_ONCE = 16


class LineOwner(Protocol):
    """Who is told what becomes of the messages. Called under the world's lock."""

    def on_carried(self, freight: Operation | Part) -> None:
        """The kernel has all of a message that was sent; or one that was waited for is here."""

    def on_line_lost(self, peer: int, freights: list[Operation | Part], reason: str) -> None:
        """The connection failed; these were under way."""

    def on_line_nonsense(self, peer: int, detail: str) -> None:
        """What came is not what was agreed on: the world must break."""


@dataclass(slots=True, eq=False)
class Letter:
    """A message at one of its ends.

    Attributes:
        memory: bytes, of the sent or the receiving tensor, which they keep; None while they are still being brought from a device.
    """

    freight: Operation | Part
    head: bytes
    memory: memoryview | None = None

    def put(self, data: Tensor) -> None:
        """Give it the memory of `data`, which is contiguous and on the host."""
        self.memory = _memory(data)


class Line:
    """This member's end of the connection to `peer`. Every method but `on_event` is called under the world's lock.

    Attributes:
        lost: why it carries nothing any more; None while it does.
    """

    def __init__(self, peer: int, sock: socket.socket, lock: threading.RLock, owner: LineOwner, board: Board) -> None:
        self.peer = peer
        self.lost: str | None = None
        self._sock = sock
        self._lock = lock
        self._owner = owner
        self._board = board
        self._mask = select.EPOLLIN
        self._receives: dict[int, deque[Letter]] = {}
        self._sends: dict[int, deque[Letter]] = {}
        self._wanted: dict[int, int] = {}  # tag → messages that the peer waits for
        self._wanted_total = 0
        # Bytes, what is carried when they have gone, and whether the next ones belong to them.
        self._outbox: deque[tuple[bytes | memoryview, Operation | Part | None, bool]] = deque()
        self._begun = False  # nothing may come before the outbox's first: part of it has gone, or its head
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._scratch_view = memoryview(self._scratch)
        self._held = 0  # bytes in scratch of a head that is not whole
        self._incoming: Letter | None = None
        self._filled = 0
        sock.setblocking(False)
        board.plug(sock.fileno(), self, self._mask)

    # -- messages ------------------------------------------------------------------------------------------------------------

    def receive(self, letter: Letter, tag: int) -> None:
        """Wait for the next message of that tag. Raises RuntimeError when the line is lost."""
        self._raise_if_lost()
        self._receives.setdefault(tag, deque()).append(letter)
        # In front of messages that have not begun: these may be long, and how many wait is all that it says.
        at = int(self._begun)
        if at and self._outbox[0][2]:  # a head that has gone in part, and its message behind it
            at += 1
        self._outbox.insert(at, (_posted(tag), None, False))
        self._flush()

    def send(self, letter: Letter, tag: int) -> None:
        """Send it when its turn has come, the peer waits for it and its memory is there. Raises RuntimeError when the line is lost."""
        self._raise_if_lost()
        self._sends.setdefault(tag, deque()).append(letter)
        if letter.memory is not None and tag not in self._wanted:
            self._read()  # the peer may have said so already
        self.advance(tag)

    def advance(self, tag: int) -> None:
        """Send what can be sent of that tag."""
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
        """Take what has come. For whoever cannot wait for the event loop."""
        if self.lost is None:
            self._read()

    def move(self, board: Board) -> None:
        """Be served by another event loop from now on."""
        if self.lost is None:
            self._board.unplug(self._sock.fileno())
            self._board = board
            board.plug(self._sock.fileno(), self, self._mask)

    def served_by(self) -> Board:
        return self._board

    def close(self) -> None:
        """End the connection. Nobody is told."""
        if self.lost is None:
            self.lost = "closed"
            self._end()
        self._sock.close()

    # -- from the event loop ----------------------------------------------------------------------------------------------------

    def on_event(self, mask: int) -> None:
        try:
            with self._lock:
                if self.lost is None and mask & ~select.EPOLLOUT:
                    self._read()
                if self.lost is None and mask & select.EPOLLOUT:
                    self._flush()
        except Exception:  # a defect of ours must not keep the event loop busy for ever
            logger.exception("the line to rank %d failed", self.peer)
            with self._lock:
                self._lose("what it sent could not be handled")

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
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
        """Where to read to: the message that is coming, and what comes behind it."""
        if self._incoming is None:
            return [self._scratch_view[self._held :]]
        assert self._incoming.memory is not None
        rest = self._incoming.memory[self._filled :]
        return [rest[:turn]] if len(rest) > turn else [rest, self._scratch_view]

    def _take(self, count: int) -> None:
        """Understand `count` bytes that came."""
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
        """A message comes, of which `come` is here already. Gives how much of that it took."""
        letters = self._receives.get(tag)
        if not letters:
            self._refuse(f"it sent a message of tag {tag} that nobody waits for")
            return 0
        letter = letters.popleft()
        if not letters:
            del self._receives[tag]
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
            while outbox and sent >= len(outbox[0][0]):
                buffer, freight, self._begun = outbox.popleft()
                sent -= len(buffer)
                if freight is not None:
                    self._owner.on_carried(freight)
            if sent:
                buffer, freight, goes_on = outbox[0]
                outbox[0] = memoryview(buffer)[sent:], freight, goes_on
                self._begun = True
        self._watch(select.EPOLLIN | select.EPOLLOUT if outbox else select.EPOLLIN)

    def _watch(self, mask: int) -> None:
        if mask != self._mask and self.lost is None:
            self._mask = mask
            self._board.modify(self._sock.fileno(), mask)

    def _raise_if_lost(self) -> None:
        if self.lost is not None:
            raise RuntimeError(self.lost)

    def _refuse(self, detail: str) -> None:
        """What came cannot be. Nothing more is read; the world breaks, tells the peer why, and ends what is pending."""
        if self.lost is None:
            self.lost = detail
            self._owner.on_line_nonsense(self.peer, detail)
            self._end()

    def _lose(self, reason: str) -> None:
        if self.lost is None:
            self.lost = reason
            self._owner.on_line_lost(self.peer, self._end(), reason)
            self._sock.close()

    def _end(self) -> list[Operation | Part]:
        """Let go of everything but the connection. Gives what was under way."""
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
    """A signature as it stands in a head."""
    assert len(signature) <= _SIGNATURE_BYTES
    return signature.encode().ljust(_SIGNATURE_BYTES, b"\0")


@functools.lru_cache(256)
def message_head(signature: str, tag: int, size_bytes: int) -> bytes:
    return HEAD.pack(MESSAGE, tag, size_bytes, sealed(signature))


@functools.lru_cache(256)
def _posted(tag: int) -> bytes:
    return HEAD.pack(POSTED, tag, 0, b"")


def _words(signature: bytes) -> str:
    return signature.rstrip(b"\0").decode(errors="replace")


def _memory(data: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the host. Whoever has them, or some of them, has the tensor."""
    size = data.nbytes
    if not size:
        return memoryview(b"")
    array = _array(size).from_address(data.data_ptr())
    array.tensor = data  # type: ignore[attr-defined] # a memoryview keeps the array, and no more
    return memoryview(array).cast("B")


@functools.lru_cache(256)
def _array(size_bytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    return ctypes.c_ubyte * size_bytes
