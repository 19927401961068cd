"""Messages between two members on one host whose data is in shared memory of the sender, "in place".

Two frames in the Unix socket of the connection are one message: PLACE passes the descriptor of a segment, and IN_PLACE is the head of the
message. The receiver copies the bytes or maps them privately as a view, and then releases the lease with RELEASE. A tensor of
`SegmentPool.allocate` is sent from its own segment. Any other tensor is copied into a segment first.

Everything that the peer sends is checked here: the descriptor (`check_segment`), offset and length against the announced message, and the
number of each lease. No state lies in shared memory.
"""

import array
import mmap
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from multiworld.ops.operation import Operation
from multiworld.ops.views import View
from multiworld.transport.segments import MIN_BYTES, Segment, SegmentPool, check_segment
from multiworld.transport.transfer import Output, Transfer
from multiworld.transport.wire import HEAD, IN_PLACE, NUMBERS, PLACE, RELEASE

_MAX_BYTES = 1 << 26
"""Larger tensors go through the socket, because a copy must not block an event loop for long."""
_MAX_LEASES = 256
"""Messages that the peer has not released. More go through the socket, because each may hold a descriptor."""
_MAX_FDS = 4
"""Received descriptors that wait for their frame."""
FD_SPACE = socket.CMSG_SPACE(array.array("i").itemsize)
"""Space for the ancillary data of one received message."""


@dataclass(slots=True)
class _Place:
    """Where the data of the next message is: descriptor, lease, and offset in bytes."""

    fd: int
    lease: int
    offset: int


class SharedMemory:
    """The messages in place of one connection. All methods except `queue_release` are called under the world's lock.

    Attributes:
        released: leases of the peer whose views were dropped here; the connection reports them.

    Args:
        pool: the segments of this process.
        on_view_dropped: called when `released` is not empty. Called by the garbage collector, on any thread.
    """

    def __init__(self, pool: SegmentPool, on_view_dropped: "weakref.WeakMethod[Callable[[], object]]") -> None:
        self.released: deque[int] = deque()
        self._pool = pool
        self._on_view_dropped = on_view_dropped
        # Sent, not released by the peer; with the operation that completes then.
        self._leases: dict[int, tuple[Segment, Operation | None]] = {}
        self._last_lease = 0
        self._fds: deque[int] = deque()
        self._place: _Place | None = None

    # -- sending -----------------------------------------------------------------------------------------------------------------

    def outputs(self, transfer: Transfer) -> tuple[Output, ...]:
        """The frames of a message in place. Empty if it must go through the socket."""
        data, memory = transfer.data, transfer.memory
        assert data is not None
        assert memory is not None
        if not MIN_BYTES <= len(memory) <= _MAX_BYTES or len(self._leases) >= _MAX_LEASES:
            return ()
        # A collective may overwrite a tensor as soon as it is sent, so only sends leave their tensor in place.
        found = self._pool.find(data) if transfer.operation.collective is None else None
        kept = (
            found is not None and not transfer.lent
        )  # the sender may change the tensor when the operation is complete
        if found is None:
            copy = self._pool.copy(memory)
            if copy is None:
                return ()
            found = copy, 0
        segment, offset = found
        self._pool.lease(segment)
        self._last_lease += 1
        self._leases[self._last_lease] = segment, transfer.operation if kept else None
        place = HEAD.pack(PLACE, 0, self._last_lease, NUMBERS.pack(offset))
        head = bytes([IN_PLACE]) + transfer.head[1:]
        return (
            Output(place, joined=True, fd=segment.fd, in_place=transfer),
            Output(head, None if kept else transfer.operation),
        )

    def revoke(self, place: Output) -> None:
        """The kernel has refused to pass the descriptor of this PLACE: the message goes through the socket."""
        _, _, lease, _ = HEAD.unpack(place.data)
        self._pool.release(self._leases.pop(lease)[0])

    def on_release(self, lease: int) -> Operation | None:
        """The peer has released a lease. Returns the operation that completes with this. Raises ValueError for an unknown lease."""
        if lease not in self._leases:
            raise ValueError(f"it released lease {lease}, which it does not have")
        segment, operation = self._leases.pop(lease)
        self._pool.release(segment)
        return operation

    # -- receiving ---------------------------------------------------------------------------------------------------------------

    def add_descriptors(self, data: bytes) -> None:
        """Take over received descriptors. Raises ValueError if the peer has sent more than it may."""
        self._fds.extend(memoryview(data[: len(data) & ~3]).cast("i"))
        if len(self._fds) > _MAX_FDS:
            raise ValueError("it sent descriptors that it did not announce")

    def on_place(self, lease: int, offset: int) -> None:
        """The next message in place is in the next descriptor. Raises ValueError."""
        if self._place is not None:
            raise ValueError("it sent two segments for one message")
        if not self._fds:
            raise ValueError("it announced a descriptor and sent none")
        self._place = _Place(self._fds.popleft(), lease, offset)

    def receive(self, size: int, match: Callable[[Callable[[View], Tensor]], Transfer | None]) -> Transfer | None:
        """Receive the data of an announced message. Raises ValueError.

        Args:
            match: returns the transfer that receives the message, or None after a violation of the protocol. Its argument provides
                the data of a view.
        Returns the complete transfer; None like `match`.
        """
        place, self._place = self._place, None
        if place is None:
            raise ValueError("it sent a message in place without its segment")
        try:
            check_segment(place.fd, place.offset, size)
            transfer = match(lambda view: self._map(view, place))
            if transfer is None or (transfer.view is not None and transfer.view.shared):
                return transfer
            assert transfer.memory is not None
            if os.preadv(place.fd, [transfer.memory], place.offset) != size:
                raise ValueError(f"it sent a segment that cannot be read at {place.offset}")
            self.released.append(place.lease)
            return transfer
        finally:
            os.close(place.fd)

    def _map(self, view: View, place: _Place) -> Tensor:
        """Map the data of a view, privately, so that writing to it changes only our memory. Without memory for it, use our own."""
        start = place.offset % mmap.ALLOCATIONGRANULARITY
        length = start + view.size_bytes
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        try:
            mapped = mmap.mmap(place.fd, length, mmap.MAP_PRIVATE, protection, offset=place.offset - start)
        except OSError:
            return view.allocate()
        release = weakref.finalize(mapped, _queue_release, weakref.ref(self), place.lease)
        release.atexit = False
        data = torch.frombuffer(mapped, dtype=torch.uint8, offset=start, count=view.size_bytes)
        return view.place(data, release)

    def queue_release(self, lease: int) -> None:
        """The view with this lease was dropped. Called by the garbage collector, on any thread and at any point, so it takes no lock."""
        self.released.append(lease)
        if on_view_dropped := self._on_view_dropped():
            on_view_dropped()

    def take_release(self) -> bytes:
        """The frame that reports the next of `released`."""
        return HEAD.pack(RELEASE, 0, self.released.popleft(), b"")

    # -- ending ------------------------------------------------------------------------------------------------------------------

    def close(self) -> list[Operation]:
        """Close the received descriptors and end all leases. Returns the operations that a release would have completed."""
        if self._place is not None:
            self._fds.append(self._place.fd)
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        leases, self._leases = self._leases, {}
        for segment, _ in leases.values():
            self._pool.release(segment, retire=True)
        self._place = None
        return [operation for _, operation in leases.values() if operation is not None]


def _queue_release(shared: "weakref.ref[SharedMemory]", lease: int) -> None:
    if (alive := shared()) is not None:
        alive.queue_release(lease)
