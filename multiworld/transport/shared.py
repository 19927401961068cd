"""A connection between two members on one host: a Unix socket for heads and small messages, shared memory for the rest.

The payload of `send_message` is sent in place if it lies in a segment of the sender (`SegmentPool.allocate`): the message passes the
descriptor of the segment. The receiver copies the bytes, or maps them as a view, and releases the lease. Other data goes through the ring,
a segment of a few slots that belongs to this connection. The sender fills a slot while the receiver copies the one before, and a slot is
written again when the receiver reports that it has copied it.

Everything that the peer sends is checked here: the descriptor (`check_segment`), offset and length against the announced message, and
the numbers of leases. No state lies in shared memory.
"""

import array
import errno
import mmap
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from multiworld.ops.buffers import byte_view
from multiworld.ops.operation import NO_MEMORY, Message, Receive, Send, View
from multiworld.transport.connection import SENDMSG_BUFFERS, Announced, PeerConnection, SocketPayloads
from multiworld.transport.memory import check_segment
from multiworld.transport.segments import MIN_BYTES, Mappings, Segment, SegmentPool
from multiworld.transport.wire import HEAD, IN_PLACE, IN_RING, PIECE, PIECE_DONE, RELEASE, RING, Output, pack_head

SLOT_BYTES = 1 << 19
SLOTS = 4
"""Size in bytes and number of the slots of a ring. Few and small, so that they stay in the caches of the processor."""
RING_BYTES = SLOTS * SLOT_BYTES
_MAX_IN_PLACE_BYTES = 1 << 26
"""Larger tensors go through the ring, because a receiver that copies must not block its event loop for long."""
_MAX_LEASES = 256
"""Messages in place that the peer has not released; more are copied, because each may hold a descriptor."""
_MAX_FDS = 4
"""Received descriptors that wait for their frame."""
_CUT = int(socket.MSG_CTRUNC)  # an operation on a member of the enumeration takes several microseconds
_FD_SPACE = socket.CMSG_SPACE(array.array("i").itemsize)


class SharedPayloads(SocketPayloads):
    """Carries the bytes of longer messages of one connection, whose socket is a Unix stream socket, through shared memory.

    Args:
        pool: the segments of this process.
    """

    def __init__(self, pool: SegmentPool) -> None:
        self._pool = pool
        self._mappings = Mappings(pool.memory)
        self._ring: Segment | None = None
        self._slots = NO_MEMORY  # of the ring
        self._pieces_sent = self._pieces_done = 0
        self._leases: dict[int, Segment] = {}  # sent in place, not released by the peer
        self._last_lease = 0
        self._fds: deque[int] = deque()
        self._peer_ring: memoryview | None = None
        self._pieces_received = 0
        self._incoming_bytes = 0

    # -- sending -----------------------------------------------------------------------------------------------------------------

    def enqueue(self, connection: PeerConnection, message: Message) -> None:
        size = len(message.memory)
        # The sender of other messages may overwrite its tensor after an error, for example a timeout, when the receiver has not read it.
        lent = isinstance(message, Send) and message.header is not None
        if size < MIN_BYTES:
            super().enqueue(connection, message)
        elif lent and self._enqueue_in_place(connection, message, size):
            pass
        else:
            self._enqueue_copied(connection, message)

    def _enqueue_copied(self, connection: PeerConnection, message: Message) -> None:
        """Send through the ring, or through the socket without memory for a ring."""
        if self._ring is not None or self._open_ring(connection):
            connection.outbox.append(Output(bytes([IN_RING]) + message.head[1:]))
            connection.outbox.append(Output(b"", message, to_ring=message.memory))
        else:
            super().enqueue(connection, message)

    def _enqueue_in_place(self, connection: PeerConnection, message: Message, size: int) -> bool:
        """Send a payload that lies in a segment: it is sent when it is announced. Returns False if it does not, or is too large."""
        assert message.data is not None
        found = self._pool.find(message.data)
        if found is None or size > _MAX_IN_PLACE_BYTES or len(self._leases) >= _MAX_LEASES:
            return False
        segment, offset = found
        self._pool.lease(segment)
        self._last_lease += 1
        self._leases[self._last_lease] = segment
        _, tag, _, signature, *_ = HEAD.unpack(message.head)
        head = HEAD.pack(IN_PLACE, tag, size, signature, self._last_lease, offset)
        connection.outbox.append(Output(head, message, fd=segment.fd, in_place=True))
        return True

    def _open_ring(self, connection: PeerConnection) -> bool:
        """Make the ring and pass it to the peer. Returns False when there is no memory for it."""
        self._ring = self._pool.take(RING_BYTES)
        if self._ring is None:
            return False
        self._slots = byte_view(self._pool.memory.tensor(self._ring.block, 0, RING_BYTES, lambda: None))
        connection.outbox.append(Output(pack_head(RING, 0, RING_BYTES), fd=self._ring.fd))
        return True

    def write(self, connection: PeerConnection) -> int:
        outbox, self.waiting = connection.outbox, False
        if outbox[0].to_ring is not None:
            self._write_piece(connection, outbox[0], outbox[0].to_ring)
        buffers: list[bytes | memoryview] = []
        passing: Output | None = None
        for output in islice(outbox, SENDMSG_BUFFERS):
            if output.to_ring is not None or (passing is not None and output.fd >= 0):
                break
            if output.fd >= 0:
                passing = output
            buffers.append(output.data)
        if passing is None:
            return connection.sock.sendmsg(buffers)
        # The descriptor is passed with the first byte, so it arrives before its frame.
        rights = array.array("i", [passing.fd])
        try:
            sent = connection.sock.sendmsg(buffers, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS or not passing.in_place:
                raise
            self._copy_instead(connection, passing)
            return self.write(connection) if outbox else 0
        passing.fd = -1
        return sent

    def _copy_instead(self, connection: PeerConnection, replaced: Output) -> None:
        """Send a message in place by copying: the user has as many descriptors in flight as open files are allowed."""
        outbox, message = connection.outbox, replaced.message
        assert message is not None
        at = next(index for index, output in enumerate(outbox) if output is replaced)
        following = [outbox.pop() for _ in range(len(outbox) - at)][::-1]
        *_, lease, _ = HEAD.unpack(replaced.data)
        self._pool.release(self._leases.pop(lease))
        if self._ring is None:  # its descriptor would be refused, too
            super().enqueue(connection, message)
        else:
            self._enqueue_copied(connection, message)
        outbox.extend(following[1:])

    def _write_piece(self, connection: PeerConnection, output: Output, rest: memoryview) -> None:
        """Copy the next piece into the ring and put its frame before the rest. Raises BlockingIOError when no slot is free."""
        self.waiting = self._pieces_sent - self._pieces_done >= SLOTS
        if self.waiting:
            raise BlockingIOError
        piece, output.to_ring = rest[:SLOT_BYTES], rest[SLOT_BYTES:]
        at = self._pieces_sent % SLOTS * SLOT_BYTES
        assert self._ring is not None
        self._slots[at : at + len(piece)] = piece
        frame = Output(pack_head(PIECE))
        self._pieces_sent += 1
        if not output.to_ring:
            frame.message = connection.outbox.popleft().message
        connection.outbox.appendleft(frame)

    # -- receiving ---------------------------------------------------------------------------------------------------------------

    def receive_into(self, sock: socket.socket, buffers: list[memoryview]) -> int:
        count, messages, flags, _ = sock.recvmsg_into(buffers, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in messages:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds.extend(memoryview(data[: len(data) & ~3]).cast("i"))
        if flags & _CUT:
            raise OSError("a descriptor that it sent was lost: this process has too many open files")
        if len(self._fds) > _MAX_FDS:
            raise ValueError("it sent descriptors that it did not announce")
        return count

    def on_frame(self, connection: PeerConnection, kind: int, announced: Announced, lease: int, offset: int) -> None:
        if kind == RING:
            self._on_ring(announced[1])
        elif kind == IN_RING:
            self._on_ring_message(connection, *announced)
        elif kind == PIECE:
            self._on_piece(connection)
        elif kind == PIECE_DONE:
            self._on_piece_done(connection)
        elif kind == IN_PLACE:
            self._on_message_in_place(connection, announced, lease, offset)
        elif kind == RELEASE:
            self._on_release(lease)
        else:
            super().on_frame(connection, kind, announced, lease, offset)

    def _on_ring(self, size: int) -> None:
        if self._peer_ring is not None or size != RING_BYTES:
            raise ValueError(f"it sent a ring of {size} bytes" if self._peer_ring is None else "it sent a second ring")
        fd = self._take_fd()
        try:
            check_segment(fd, 0, RING_BYTES)
            self._peer_ring = memoryview(mmap.mmap(fd, RING_BYTES, prot=mmap.PROT_READ))
        finally:
            os.close(fd)

    def _on_ring_message(self, connection: PeerConnection, tag: int, size: int, signature: bytes) -> None:
        if self.incoming is not None or self._peer_ring is None or not size:
            raise ValueError("it sent a message through a ring that is not ready for it")
        self.incoming, self._incoming_bytes = connection.queues.match(tag, size, signature), 0

    def _on_piece(self, connection: PeerConnection) -> None:
        message, ring = self.incoming, self._peer_ring
        if message is None or ring is None:
            raise ValueError("it sent a piece of no message")
        start = self._incoming_bytes
        end = self._incoming_bytes = min(start + SLOT_BYTES, len(message.memory))
        at = self._pieces_received % SLOTS * SLOT_BYTES
        message.memory[start:end] = ring[at : at + end - start]
        self._pieces_received += 1
        complete = end == len(message.memory)
        if complete:
            self.incoming = None
        connection.write_first(pack_head(PIECE_DONE))
        if complete:
            connection.owner.on_transferred(message)

    def _on_piece_done(self, connection: PeerConnection) -> None:
        if self._pieces_done == self._pieces_sent:
            raise ValueError("it released a piece that it does not have")
        self._pieces_done += 1
        if self.waiting:
            self.waiting = False
            connection.flush()

    def _on_message_in_place(self, connection: PeerConnection, announced: Announced, lease: int, offset: int) -> None:
        fd, size = self._take_fd(), announced[1]
        try:
            check_segment(fd, offset, size)
            message = connection.queues.match(*announced, lambda view: self._place(connection, view, fd, lease, offset))
            if not isinstance(message, Receive) or message.view is None or not message.view.shared:
                if os.preadv(fd, [message.memory], offset) != size:
                    raise ValueError(f"it sent a segment that cannot be read at {offset}")
                connection.write_first(pack_head(RELEASE, lease=lease))
        finally:
            os.close(fd)
        connection.owner.on_transferred(message)

    def _place(self, connection: PeerConnection, view: View, fd: int, lease: int, offset: int) -> Tensor:
        """Map the data of a view. Without memory for it, use our own."""
        on_dropped = partial(_release, weakref.ref(connection), pack_head(RELEASE, lease=lease))
        try:
            if self._pool.keep_mappings:
                size = os.fstat(fd).st_size
                return view.place(self._mappings.view(fd, size, offset, view.size_bytes, on_dropped))
            return view.place(_private(fd, offset, view.size_bytes, on_dropped))
        except OSError:
            return view.allocate()

    def _on_release(self, lease: int) -> None:
        if lease not in self._leases:
            raise ValueError(f"it released lease {lease}, which it does not have")
        self._pool.release(self._leases.pop(lease))

    def _take_fd(self) -> int:
        if not self._fds:
            raise ValueError("it announced a descriptor and sent none")
        return self._fds.popleft()

    # -- ending ------------------------------------------------------------------------------------------------------------------

    def stop(self) -> list[Message]:
        pending = [] if self.incoming is None else [self.incoming]
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        for segment in self._leases.values():
            self._pool.release(segment, retire=True)
        self._leases.clear()
        self._slots, self._mappings = NO_MEMORY, Mappings(self._pool.memory)
        if self._ring is not None:
            self._pool.release(self._ring, retire=True)
        self._ring = self._peer_ring = self.incoming = None
        return pending


def _private(fd: int, offset: int, size: int, on_dropped: Callable[[], object]) -> Tensor:
    """Map memory of the peer so that writing to it changes only our memory. Raises OSError."""
    start = offset % mmap.ALLOCATIONGRANULARITY
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    mapped = mmap.mmap(fd, start + size, mmap.MAP_PRIVATE, protection, offset=offset - start)
    weakref.finalize(mapped, on_dropped).atexit = False
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=start, count=size)


def _release(connection: "weakref.ref[PeerConnection]", frame: bytes) -> None:
    """The view was dropped. Called by the garbage collector."""
    if (alive := connection()) is not None:
        alive.queue_frame(frame)
