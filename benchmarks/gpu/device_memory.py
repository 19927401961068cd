"""Memory of a GPU that processes on one host lend each other by descriptors. Not run on a GPU yet.

This is the kind of memory for GPUs that are connected by NVLink: a consumer copies from the memory of the producer to its own, without the
host. The five functions of `multiworld.transport.memory.Memory` are those of CUDA's virtual memory management, so pools, leases and kept
mappings work with it. The service does not use it yet. Tests run it on memory of the host, see tests/fakes/driver.py.

The step measures what is not known without a GPU. Without one, it measures ordinary memory.
"""

import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.setup import NeedsGpuError, Setup
from multiworld.transport.memory import Block, HostMemory, Memory
from multiworld.transport.segments import Mappings, SegmentPool

MIB = 1 << 20
_PATIENCE_S = 20.0


class DeviceMemory:
    """Memory of one GPU. The caller waits for its kernels before it sends or releases a block.

    Args:
        device: the number of the GPU.
        driver: `cuda.bindings.driver`.

    Raises OSError if the driver refuses.
    """

    def __init__(self, device: int, driver: Any) -> None:
        self._driver = driver
        self._device = device
        kind = driver.CUmemAllocationProp()
        kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        kind.location.id = device
        self._kind = kind
        flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._granularity = self._call("cuMemGetAllocationGranularity", kind, flag)

    def create(self, size: int) -> Block:
        size = -(-size // self._granularity) * self._granularity
        handle = self._call("cuMemCreate", size, self._kind, 0)
        fd = self._call("cuMemExportToShareableHandle", handle, self._kind.requestedHandleTypes, 0)
        return self._map(handle, size, self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE, fd)

    def key(self, fd: int) -> Hashable:
        """The driver does not say whether two descriptors of one block have one inode: `measured` does."""
        status = os.fstat(fd)
        return status.st_dev, status.st_ino

    def open(self, fd: int, size: int) -> Block:
        size = -(-size // self._granularity) * self._granularity
        handle = self._call("cuMemImportFromShareableHandle", fd, self._kind.requestedHandleTypes)
        return self._map(handle, size, self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ)

    def tensor(self, block: Block, offset: int, size: int, on_dropped: Callable[[], object]) -> Tensor:
        """The view keeps an object of this interface alive; see `numba`'s documentation of the CUDA array interface."""
        return torch.as_tensor(_Array(block, offset, size, on_dropped), device=torch.device("cuda", self._device))

    def close(self, address: int, size: int, fd: int) -> None:
        self._call("cuMemUnmap", address, size)
        self._call("cuMemAddressFree", address, size)
        if fd >= 0:
            os.close(fd)

    def _map(self, handle: Any, size: int, flags: Any, fd: int = -1) -> Block:
        """Map all of an allocation. The mapping keeps the memory when the handle is released."""
        try:
            address = int(self._call("cuMemAddressReserve", size, 0, 0, 0))
            self._call("cuMemMap", address, size, 0, handle, 0)
        finally:
            self._call("cuMemRelease", handle)
        block = Block(self, address, size, fd)
        access = self._driver.CUmemAccessDesc()
        access.location, access.flags = self._kind.location, flags
        self._call("cuMemSetAccess", address, size, [access], 1)
        return block

    def _call(self, function: str, *arguments: Any) -> Any:
        status, *found = getattr(self._driver, function)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise OSError(errno.ENOMEM, f"{function}: {status}")
        return found[0] if found else None


class _Array:
    """What torch makes a tensor of, without a copy."""

    def __init__(self, block: Block, offset: int, size: int, on_dropped: Callable[[], object]) -> None:
        self._block, self._on_dropped = block, on_dropped
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (block.address + offset, False),
            "version": 3,
        }

    def __del__(self) -> None:
        self._on_dropped()


def memory_of(device: torch.device) -> Memory:
    """The kind of memory to measure."""
    if device.type != "cuda":
        return HostMemory()
    from cuda.bindings import driver  # noqa: PLC0415 - with torch for CUDA only

    torch.zeros(1, device=device)  # CUDA makes its context
    return DeviceMemory(device.index or 0, driver)


def lend(fd: str, device_name: str, *sizes: str) -> None:
    """The producer: lend a segment of each size, twice, each with its own bytes. Returns when the consumer closes the connection."""
    sock, device = socket.socket(fileno=int(fd)), torch.device(device_name)
    pool = SegmentPool(1 << 30, memory=memory_of(device))
    for number, size in enumerate(int(size) for size in sizes for _ in range(2)):
        tensor = pool.allocate((size,), torch.uint8).fill_(number + 1)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        segment, offset = pool.find(tensor) or (None, 0)
        assert segment is not None, "there is memory for it"
        socket.send_fds(sock, [json.dumps([size, segment.size, offset, number + 1]).encode()], [segment.fd])
        if not sock.recv(1):
            return
        del tensor
    sock.recv(1)


def measured(device: torch.device, sizes: list[int]) -> Iterator[tuple[str, Any]]:
    """The consumer: what a fetch from another process costs, and what is left of a killed one. Yields names and values."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = "import sys; from benchmarks.gpu.device_memory import lend; lend(*sys.argv[1:])"  # CUDA cannot be used after a fork
    command = [sys.executable, "-c", code, str(theirs.fileno()), str(device), *map(str, sizes)]
    with ours, theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as producer:
        theirs.close()
        ours.settimeout(_PATIENCE_S)
        mappings, keys = Mappings(memory_of(device)), dict[int, set[Hashable]]()
        for _ in range(2 * len(sizes)):
            message, fds, *_ = socket.recv_fds(ours, 1024, 1)
            size, block_bytes, offset, value = json.loads(message)
            keys.setdefault(size, set()).add(mappings._memory.key(fds[0]))
            began_s = time.perf_counter()
            view = mappings.view(fds[0], block_bytes, offset, size, lambda: None)
            copied = view.clone()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            took_ms = (time.perf_counter() - began_s) * 1e3
            assert bool((copied == value).all()), "the bytes of the producer"
            yield f"{size / MIB:g} MiB, {'kept' if value % 2 == 0 else 'first'} mapping, ms", round(took_ms, 3)
            os.close(fds[0])
            if value < 2 * len(sizes):
                ours.send(b".")
        distinct = {key for found in keys.values() for key in found}
        yield "descriptors identify their block", [len(each) for each in keys.values()] == [1] * len(distinct)
        producer.kill()
        producer.wait()
        yield "bytes are intact after the producer was killed", bool((view.clone() == value).all())


def step(setup: Setup) -> None:
    """See `measured`."""
    sizes = [MIB, 4 * MIB] if setup.small else [MIB, 16 * MIB, 64 * MIB]
    for name, value in measured(torch.device(setup.device), sizes):
        setup.add(name, value)
    if not setup.on_gpu:
        raise NeedsGpuError("memory of the host was lent")
