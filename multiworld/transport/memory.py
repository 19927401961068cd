"""Memory that processes on one host lend each other: the five functions that a kind of memory needs, and those of ordinary memory.

Pools, leases and kept mappings use these functions only. benchmarks/gpu/device_memory.py has those of a GPU, by CUDA's virtual memory
management, which have not run yet. Tests use both kinds.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Hashable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_F_SEAL_FUTURE_WRITE = 0x10
_HUGE_BYTES = 2 << 20
"""From this size on, memory asks for huge pages, which are mapped faster: 6 MiB go there and back in place in 0.6 ms, else in 1.9.
The kernel grants them if /sys/kernel/mm/transparent_hugepage/shmem_enabled is `advise`."""
_MADV_POPULATE_WRITE = 23
"""Allocates the pages of a mapping (Linux 5.14 and newer); posix_fallocate would allocate small ones."""

Register: TypeAlias = Callable[[int, int, bool], Callable[[], None]]
"""Prepares memory, given its address, its size in bytes, and whether this process may write it. Returns what undoes it before the memory is
unmapped. Neither may raise."""


class Block:
    """Memory that this process has mapped. It is closed when no reference and no tensor inside it is left.

    Attributes:
        fd: lets other processes open it; -1 if another process has made it.
    """

    def __init__(self, memory: "Memory", address: int, size: int, fd: int = -1) -> None:
        self.address, self.size, self.fd = address, size, fd
        self.close = weakref.finalize(self, memory.close, address, size, fd)
        self.close.atexit = False


class Memory(Protocol):
    """A kind of memory. Its functions may be called from any thread."""

    def create(self, size: int) -> Block:
        """Make memory that other processes can open, at least `size` bytes. Raises OSError if there is none."""

    def key(self, fd: int) -> Hashable:
        """Identify the block of a descriptor: it is equal for all descriptors of one block while one of them, or a mapping, exists."""

    def open(self, fd: int, size: int) -> Block:
        """Map memory of another process, which this process may only read. Raises OSError without room, ValueError if it is invalid."""

    def tensor(self, block: Block, offset: int, size: int, on_dropped: Callable[[], object]) -> Tensor:
        """Return a view uint8 [size]. When all tensors that use it are dropped, `on_dropped` is called, by the garbage collector."""

    def close(self, address: int, size: int, fd: int) -> None:
        """Unmap a block and close its descriptor. Another process that has opened it keeps the memory."""


class HostMemory:
    """Ordinary memory. It has no name, so nothing is left when a process is killed.

    Its size is sealed, so a process that maps it cannot get SIGBUS. Only the process that has made it can write it (F_SEAL_FUTURE_WRITE,
    Linux 5.1 and newer).

    Args:
        register: prepares each mapping, for example pins it for copies from and to a GPU; None: nothing.
    """

    def __init__(self, register: Register | None = None) -> None:
        self._register = register
        self._undo: dict[int, Callable[[], None]] = {}  # by address

    def create(self, size: int) -> Block:
        fd = os.memfd_create("multiworld", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            block = self._map(fd, size, mmap.PROT_READ | mmap.PROT_WRITE, fd)
        except OSError:
            os.close(fd)
            raise
        if size >= _HUGE_BYTES:  # not known to each kernel
            for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
                _libc.madvise(block.address, size, advice)
        os.posix_fallocate(fd, 0, size)  # reports missing memory now; a later access would end the process
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
        return self._registered(block, True)

    def key(self, fd: int) -> Hashable:
        status = os.fstat(fd)
        return status.st_dev, status.st_ino

    def open(self, fd: int, size: int) -> Block:
        check_segment(fd, 0, size)
        return self._registered(self._map(fd, size, mmap.PROT_READ), False)

    def tensor(self, block: Block, offset: int, size: int, on_dropped: Callable[[], object]) -> Tensor:
        array = (ctypes.c_ubyte * size).from_address(block.address + offset)
        array.block = block  # type: ignore[attr-defined] # the tensor keeps only the array alive
        weakref.finalize(array, on_dropped).atexit = False
        return torch.frombuffer(array, dtype=torch.uint8)

    def close(self, address: int, size: int, fd: int) -> None:
        self._undo.pop(address, lambda: None)()
        _libc.munmap(address, size)
        if fd >= 0:
            os.close(fd)

    def _map(self, fd: int, size: int, protection: int, own_fd: int = -1) -> Block:
        # Not the module mmap: it does not tell the address of memory that may only be read.
        address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return Block(self, address, size, own_fd)

    def _registered(self, block: Block, is_writable: bool) -> Block:
        if self._register is not None:
            self._undo[block.address] = self._register(block.address, block.size, is_writable)
        return block


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


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long
_libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
_libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_MAP_FAILED = ctypes.c_void_p(-1).value
