"""The segments of one process: memory that a tensor can be produced in and sent from without a copy, and what peers have lent to it.

A segment contains data only: who uses it is counted here, from messages.
"""

import logging
import math
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch
from torch import Tensor

from multiworld.transport.memory import Block, HostMemory, Memory

logger = logging.getLogger(__name__)

MIN_BYTES = 1 << 16
"""Smaller tensors are sent through the socket; measured with `benchmarks.send_recv`."""
_MAX_SEGMENTS = 128
"""Limit of segments per process; each needs two file descriptors."""
_LOG_INTERVAL_S = 10.0
"""Time between warnings that there is no shared memory."""
_MAX_KEPT = 64
_MAX_KEPT_BYTES = 1 << 28
"""Limits of the blocks of one peer that stay mapped while no tensor uses them."""


class Segment:
    """A block of this process.

    Attributes:
        users: the tensor or the ring of this process in the segment, and each sent message in it that its receiver has not released.
        retired: the segment is freed, not used again, when it is unused. A receiver whose connection has ended may still read it.
    """

    def __init__(self, block: Block, size: int) -> None:
        self.block, self.address, self.fd = block, block.address, block.fd
        self.size = size
        self.users = 1
        self.retired = False


class SegmentPool:
    """The segments of a process. All methods may be called from any thread.

    Attributes:
        reserved_bytes: size of all segments, in use or kept for the next tensor.

    Args:
        budget_bytes: limit of the size of all segments together.
        on_missing: called each time that the system has no memory for a segment. Must not block, raise or use the pool.
        memory: the kind of memory.
        keep_mappings: receive views with `Mappings`.
    """

    def __init__(
        self,
        budget_bytes: int,
        on_missing: Callable[[], None] = lambda: None,
        memory: Memory | None = None,
        keep_mappings: bool = False,
    ) -> None:
        self._budget_bytes = budget_bytes
        self._on_missing = on_missing
        self.memory = HostMemory() if memory is None else memory
        self.keep_mappings = keep_mappings
        self._logged_s = -_LOG_INTERVAL_S
        self.forget()
        _pools.add(self)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous tensor in a segment; in ordinary memory if it is small or the budget is used up."""
        size = math.prod(shape) * dtype.itemsize
        segment = self.take(size) if size >= MIN_BYTES else None
        if segment is None:
            return torch.empty(tuple(shape), dtype=dtype)
        on_dropped = partial(self._on_tensor_dropped, self._dropped, segment)
        return self.memory.tensor(segment.block, 0, size, on_dropped).view(dtype).view(tuple(shape))

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
            self.reserved_bytes += capacity
        try:  # without the lock, because pinning memory takes long
            segment = Segment(self.memory.create(capacity), capacity)
        except OSError as error:
            with self._lock:
                self.reserved_bytes -= capacity
            self._report_missing(size, error)
            return None
        with self._lock:
            self._segments[segment.address] = segment
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
        segment.block.close()

    def _make_room(self, size: int) -> None:
        """Free kept segments of other sizes until one of `size` bytes is within the limits."""
        for kept in self._kept.values():
            while kept and (len(self._segments) >= _MAX_SEGMENTS or self.reserved_bytes + size > self._budget_bytes):
                self._free(kept.pop())

    def forget(self) -> None:
        """Start without segments. In a forked child, those of the parent must not be used, and their descriptors are closed."""
        self._lock = threading.Lock()  # another thread of the parent may hold that of the parent
        for segment in getattr(self, "_segments", {}).values():
            if segment.block.close.detach() is not None:  # its tensors may be used
                os.close(segment.fd)
        self._segments: dict[int, Segment] = {}  # by address
        self._kept: dict[int, list[Segment]] = {}  # unused, by size
        self._dropped: deque[Segment] = deque()
        self.reserved_bytes = 0


_pools: weakref.WeakSet[SegmentPool] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in list(_pools):
        pool.forget()


os.register_at_fork(after_in_child=_forget_all)


class Mappings:
    """The blocks that one peer has lent. Each is opened once and kept, so that it is pinned for a GPU once. Not thread-safe.

    Its tensors may only be read: writing to them ends the process. A block that was evicted stays mapped until its last tensor is dropped.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._blocks: dict[Hashable, Block] = {}  # the last used one last

    def view(self, fd: int, block_bytes: int, offset: int, size: int, on_dropped: Callable[[], object]) -> Tensor:
        """Return a view uint8 [size] of the block of a descriptor. Arguments and errors are those of `Memory.open` and `Memory.tensor`."""
        key = self._memory.key(fd)
        block = self._blocks.pop(key, None)
        if block is None:
            block = self._memory.open(fd, block_bytes)
            self._evict(block_bytes)
        self._blocks[key] = block
        return self._memory.tensor(block, offset, size, on_dropped)

    def _evict(self, more_bytes: int) -> None:
        kept_bytes = sum(block.size for block in self._blocks.values())
        while self._blocks and (len(self._blocks) >= _MAX_KEPT or kept_bytes + more_bytes > _MAX_KEPT_BYTES):
            kept_bytes -= self._blocks.pop(next(iter(self._blocks))).size


def _capacity(size: int) -> int:
    """Size of the segment for `size` bytes: a multiple of a quarter of the next lower power of two, so that segments fit again."""
    step = max(1 << (size - 1).bit_length() - 3, mmap.PAGESIZE)
    return -(-size // step) * step
