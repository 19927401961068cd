"""Shared memory of one process: memfd segments that a tensor can be produced in and sent from without a copy.

A segment has no name, so nothing is left when a process is killed. Its size is sealed, so a consumer that maps it cannot get SIGBUS, and
only the mapping of the producer can be written (F_SEAL_FUTURE_WRITE, Linux 5.1 and newer). It contains data only: who uses it is counted
here, from messages.
"""

import contextlib
import errno
import fcntl
import logging
import math
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MIN_BYTES = 1 << 16
"""Smaller tensors are sent through the socket; measured with `benchmarks.send_recv`."""
_MAX_SEGMENTS = 128
"""Limit of segments per process; each needs two file descriptors."""
_LOG_INTERVAL_S = 10.0
"""Time between warnings that there is no shared memory."""
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_F_SEAL_FUTURE_WRITE = 0x10
_HUGE_BYTES = 2 << 20
"""From this size on, a segment asks for huge pages, which are mapped faster: 6 MiB go there and back in place in 0.6 ms, else in 1.9.
The kernel grants them if /sys/kernel/mm/transparent_hugepage/shmem_enabled is `advise`."""
_MADV_POPULATE_WRITE = 23
"""Allocates the pages of a mapping (Linux 5.14 and newer); posix_fallocate would allocate small ones."""


class Segment:
    """A memfd that this process has mapped. Closed when no reference and no tensor inside it is left.

    Attributes:
        users: the tensor or the ring of this process in the segment, and each sent message in it that its receiver has not released.
        unregister: called before the segment is freed; see `Register`.
        retired: the segment is freed, not used again, when it is unused. A receiver whose connection has ended may still read it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.unregister: Callable[[], None] = lambda: None
        self.users = 1
        self.retired = False
        self.fd = os.memfd_create("multiworld", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.close = weakref.finalize(self, os.close, self.fd)
        self.close.atexit = False
        os.ftruncate(self.fd, size)
        self.memory = mmap.mmap(self.fd, size)
        if size >= _HUGE_BYTES:
            with contextlib.suppress(OSError):  # not known to this kernel
                self.memory.madvise(mmap.MADV_HUGEPAGE)
                self.memory.madvise(_MADV_POPULATE_WRITE)
        os.posix_fallocate(self.fd, 0, size)  # reports missing memory now; a later access would end the process
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)


Register: TypeAlias = Callable[[int, int], Callable[[], None]]
"""Prepares the memory of a new segment, given its address and size in bytes. Returns what undoes it before the memory is freed. Neither
may raise."""


class SegmentPool:
    """The segments of a process. All methods may be called from any thread.

    Attributes:
        reserved_bytes: size of all segments, in use or kept for the next tensor.

    Args:
        budget_bytes: limit of the size of all segments together.
        on_missing: called each time that the system has no memory for a segment. Must not block, raise or use the pool.
        register: prepares the memory of each segment, for example pins it for copies from a GPU; None: nothing. Must not use the pool.
    """

    def __init__(
        self,
        budget_bytes: int,
        on_missing: Callable[[], None] = lambda: None,
        register: Register | None = None,
    ) -> None:
        self._budget_bytes = budget_bytes
        self._on_missing = on_missing
        self._register = register
        self._logged_s = -_LOG_INTERVAL_S
        self.forget()
        _pools.add(self)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous tensor in a segment; in ordinary memory if it is small or the budget is used up."""
        size = math.prod(shape) * dtype.itemsize
        segment = self.take(size) if size >= MIN_BYTES else None
        if segment is None:
            return torch.empty(tuple(shape), dtype=dtype)
        buffer = memoryview(segment.memory)  # the storage of the tensor keeps it alive
        weakref.finalize(buffer, self._on_tensor_dropped, self._dropped, segment).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8, count=size).view(dtype).view(tuple(shape))

    def take(self, size: int) -> Segment | None:
        """Take an unused segment of at least `size` bytes until `release`; None if there is no memory for it."""
        capacity = _capacity(size)
        with self._lock:
            self._reap()
            if kept := self._kept.get(capacity):
                segment = kept.pop()
                segment.users = 1
                return segment
            self._make_room(capacity)
            if len(self._segments) >= _MAX_SEGMENTS or self.reserved_bytes + capacity > self._budget_bytes:
                return None
            try:
                segment = Segment(capacity)
            except OSError as error:
                self._report_missing(size, error)
                return None
            if self._register is not None:
                segment.unregister = self._register(segment.address, capacity)
            self._segments[segment.address] = segment
            self.reserved_bytes += capacity
        return segment

    def _report_missing(self, size: int, error: OSError) -> None:
        self._on_missing()
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s = now_s
            logger.warning("no shared memory for %d bytes, the data is copied: %s", size, error)

    def find(self, tensor: Tensor) -> tuple[Segment, int] | None:
        """Return the segment in which the contiguous `tensor` lies, and its offset there in bytes; None if it lies elsewhere."""
        segment = self._segments.get(tensor.untyped_storage().data_ptr())
        return None if segment is None else (segment, tensor.data_ptr() - segment.address)

    def lease(self, segment: Segment) -> None:
        """A message in the segment is sent: it must not be used again before `release`."""
        with self._lock:
            segment.users += 1

    def release(self, segment: Segment, *, retire: bool = False) -> None:
        """End a lease, or the use of a ring. `retire`: the receiver did not release it, so the segment is freed when it is unused."""
        with self._lock:
            segment.retired |= retire
            self._end_use(segment)

    def close(self) -> None:
        """Free the unused segments, and each of the others when its tensor and its receivers have released it."""
        with self._lock:
            self._reap()
            for segment in list(self._segments.values()):
                segment.retired = True
            for kept in self._kept.values():
                while kept:
                    self._free(kept.pop())

    # -- under the lock ------------------------------------------------------------------------------------------------------

    def _on_tensor_dropped(self, dropped: deque[Segment], segment: Segment) -> None:
        """No tensor uses the segment any more. Called by the garbage collector, on any thread, maybe inside any method."""
        dropped.append(segment)
        if self._lock.acquire(blocking=False):
            try:
                self._reap()
            finally:
                self._lock.release()

    def _reap(self) -> None:
        while self._dropped:
            self._end_use(self._dropped.popleft())

    def _end_use(self, segment: Segment) -> None:
        """Keep a segment that nothing uses any more for the next tensor, or free it if it is retired."""
        segment.users -= 1
        if segment.users or segment.address not in self._segments:
            return
        if segment.retired:
            self._free(segment)
        else:
            self._kept.setdefault(segment.size, []).append(segment)

    def _free(self, segment: Segment) -> None:
        del self._segments[segment.address]
        self.reserved_bytes -= segment.size
        segment.unregister()
        segment.close()

    def _make_room(self, size: int) -> None:
        """Free kept segments of other sizes until one of `size` bytes is within the limits."""
        for kept in self._kept.values():
            while kept and (len(self._segments) >= _MAX_SEGMENTS or self.reserved_bytes + size > self._budget_bytes):
                self._free(kept.pop())

    def forget(self) -> None:
        """Start without segments. In a forked child, those of the parent must not be used, and their descriptors are closed."""
        self._lock = threading.Lock()  # another thread of the parent may hold that of the parent
        for segment in getattr(self, "_segments", {}).values():
            segment.close()
        self._segments: dict[int, Segment] = {}  # by address
        self._kept: dict[int, list[Segment]] = {}  # unused, by size
        self._dropped: deque[Segment] = deque()
        self.reserved_bytes = 0


_pools: weakref.WeakSet[SegmentPool] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in list(_pools):
        pool.forget()


os.register_at_fork(after_in_child=_forget_all)


def check_segment(fd: int, offset: int, size: int) -> None:
    """Check a descriptor from another process: a memfd whose size is sealed and that has `size` bytes at `offset`.

    Raises ValueError otherwise. Then neither a read nor a mapping of these bytes can fail or block later.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise ValueError("it sent a descriptor that is not shared memory") from None
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise ValueError("it sent shared memory whose size can change")
    if offset < 0 or offset + size > (length := os.fstat(fd).st_size):
        raise ValueError(f"it sent {size} bytes at {offset} of a segment of {length}")


def _capacity(size: int) -> int:
    """Size of the segment for `size` bytes: a multiple of a quarter of the next lower power of two, so that segments fit again."""
    step = max(1 << (size - 1).bit_length() - 3, mmap.PAGESIZE)
    return -(-size // step) * step
