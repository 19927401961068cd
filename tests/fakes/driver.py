"""CUDA's virtual memory management in memory of the host: the functions of `cuda.bindings.driver`, and its own enumerations and structures.

Each allocation is a memfd. It is accounted for by handles, mappings and descriptors, as the driver does, and a wrong order of calls fails.
"""

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.device_memory import DeviceMemory, _Array
from multiworld.transport.memory import Block

GRANULARITY = 2 << 20
_MAP_FIXED = 0x10
_PROT_NONE = 0


class FakeDriver:
    """Attributes:
    mapped: size of each mapping, by address.
    handles: descriptor of each handle that is not released.
    """

    def __init__(self, limit_bytes: int = 1 << 30) -> None:
        self._real: Any = pytest.importorskip("cuda.bindings.driver")
        self._limit_bytes = limit_bytes
        self._reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.opened = 0

    def __getattr__(self, name: str) -> Any:
        assert not name.startswith("cu"), f"{name} has no fake"
        return getattr(self._real, name)

    def _done(self, *values: Any) -> tuple[Any, ...]:
        return (self._real.CUresult.CUDA_SUCCESS, *values)

    def _handle(self, fd: int) -> tuple[Any, ...]:
        self.handles[number := 1000 + max(self.handles, default=0)] = fd
        return self._done(number)

    def cuMemGetAllocationGranularity(self, kind: Any, flag: Any) -> tuple[Any, ...]:
        return self._done(GRANULARITY)

    def cuMemCreate(self, size: int, kind: Any, flags: int) -> tuple[Any, ...]:
        assert size % GRANULARITY == flags == 0
        assert kind.type == self._real.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        assert kind.location.type == self._real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        if size + sum(self.mapped.values()) > self._limit_bytes:
            return self._real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        fd = os.memfd_create("gpu")
        os.ftruncate(fd, size)
        return self._handle(fd)

    def cuMemExportToShareableHandle(self, handle: int, kind: Any, flags: int) -> tuple[Any, ...]:
        assert kind == self._real.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return self._done(os.dup(self.handles[handle]))

    def cuMemImportFromShareableHandle(self, fd: int, kind: Any) -> tuple[Any, ...]:
        self.opened += 1
        return self._handle(os.dup(fd))

    def cuMemAddressReserve(self, size: int, alignment: int, hint: int, flags: int) -> tuple[Any, ...]:
        address = _libc.mmap(None, size, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self._reserved[address] = size
        return self._done(address)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        assert (self._reserved[address], offset, flags) == (size, 0, 0)
        _libc.mmap(address, size, _PROT_NONE, mmap.MAP_SHARED | _MAP_FIXED, self.handles[handle], 0)
        self.mapped[address] = size
        return self._done()

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Any, ...]:
        assert (self.mapped[address], len(access)) == (size, count)
        _libc.mprotect(address, size, access[0].flags & 3)  # reading and writing have the numbers of mprotect
        return self._done()

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        os.close(self.handles.pop(handle))
        return self._done()

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        assert self.mapped.pop(address) == size
        return self._done()

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        assert address not in self.mapped
        assert self._reserved.pop(address) == size
        _libc.munmap(address, size)
        return self._done()


class FakeDeviceMemory(DeviceMemory):
    """Makes tensors of the CPU over the memory, which torch would make on the GPU."""

    def tensor(self, block: Block, offset: int, size: int, on_dropped: Callable[[], object]) -> Tensor:
        array = _Array(block, offset, size, on_dropped)
        address, _ = array.__cuda_array_interface__["data"]
        bytes_ = (ctypes.c_ubyte * size).from_address(address)
        bytes_.array = array  # type: ignore[attr-defined] # the tensor keeps only the bytes alive
        return torch.frombuffer(bytes_, dtype=torch.uint8)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long
_libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
