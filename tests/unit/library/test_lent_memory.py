"""Memory that processes lend each other, of both kinds: ordinary memory, and that of a GPU with the driver of tests/fakes/driver.py.

What a connection does with it: test_shared_memory.py.
"""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from multiworld.transport import segments
from multiworld.transport.memory import Block, HostMemory, Memory
from multiworld.transport.segments import Mappings, Segment, SegmentPool
from tests.fakes.driver import FakeDeviceMemory, FakeDriver
from tests.nursery import NURSERY, ForkedProcess

MIB = 1 << 20
PATIENCE_S = 60.0
KINDS: dict[str, Callable[[], Memory]] = {
    "host": HostMemory,
    "device": lambda: FakeDeviceMemory(0, FakeDriver()),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


class Counted:
    """A kind of memory that counts what is open."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.opened, self.closed = 0, 0
        self.key, self.create, self.tensor = memory.key, memory.create, memory.tensor

    def open(self, fd: int, size: int) -> Block:
        self.opened += 1
        return self._memory.open(fd, size)


def ignore() -> None:
    """The view was dropped."""


def lent(pool: SegmentPool, size: int, value: int) -> tuple[Tensor, Segment]:
    """A tensor with this value in all bytes, and its segment, which has a lease as for a sent message."""
    tensor = pool.allocate((size,), torch.uint8).fill_(value)
    found = pool.find(tensor)
    assert found is not None
    pool.lease(found[0])
    return tensor, found[0]


def mappings_in_this_process() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:")


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    before = mappings_in_this_process(), len(os.listdir("/proc/self/fd"))
    yield
    assert (mappings_in_this_process(), len(os.listdir("/proc/self/fd"))) == before


@each_kind
@pytest.mark.usefixtures("nothing_is_left")
def test_segment_is_used_again_when_tensor_and_lease_have_ended(kind: str) -> None:
    pool = SegmentPool(8 * MIB, memory=KINDS[kind]())
    tensor, segment = lent(pool, MIB, 1)
    address = tensor.data_ptr()
    del tensor
    assert pool.allocate((MIB,), torch.uint8).data_ptr() != address
    pool.release(segment)
    again = [pool.allocate((MIB,), torch.uint8) for _ in range(2)]
    assert address in {each.data_ptr() for each in again}
    assert pool.reserved_bytes == 2 * MIB
    del again
    pool.close()
    assert pool.reserved_bytes == 0


@each_kind
@pytest.mark.usefixtures("nothing_is_left")
def test_block_is_opened_once_for_all_views_in_it(kind: str) -> None:
    pool, memory = SegmentPool(8 * MIB, memory=KINDS[kind]()), Counted(KINDS[kind]())
    mappings, dropped = Mappings(memory), list[int]()  # type: ignore[arg-type] # it has all functions
    for value in range(3):
        tensor, segment = lent(pool, MIB, value)
        received = os.dup(segment.fd)
        view = mappings.view(received, segment.size, 5, 100, lambda value=value: dropped.append(value))  # type: ignore[misc]
        os.close(received)
        assert view.tolist() == [value] * 100
        part = view[7:]
        del view, tensor
        assert dropped == [*range(value)], "a tensor uses the view"
        del part
        assert dropped == [*range(value + 1)]
        pool.release(segment)
    assert memory.opened == 1
    pool.close()


@each_kind
@pytest.mark.usefixtures("nothing_is_left")
def test_block_that_was_evicted_stays_mapped_until_its_views_are_dropped(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_MAX_KEPT", 2)
    pool, memory = SegmentPool(64 * MIB, memory=KINDS[kind]()), Counted(KINDS[kind]())
    mappings = Mappings(memory)  # type: ignore[arg-type]
    all_lent = [lent(pool, MIB, value) for value in range(4)]
    views = [mappings.view(segment.fd, segment.size, 0, MIB, ignore) for _, segment in all_lent]
    assert len(mappings._blocks) == 2
    for value, view in enumerate(views):
        assert bool((view == value).all())
    mapped = mappings_in_this_process()
    del view, views[0]
    assert mappings_in_this_process() == mapped - 1
    mappings.view(all_lent[3][1].fd, MIB, 0, MIB, ignore)
    assert memory.opened == 4, "it was kept"
    mappings.view(all_lent[0][1].fd, MIB, 0, MIB, ignore)
    assert memory.opened == 5, "it was evicted"
    del views
    for _, segment in all_lent:
        pool.release(segment)
    del all_lent
    pool.close()


def test_memory_is_missing_when_the_driver_has_none() -> None:
    missing = list[int]()
    memory = FakeDeviceMemory(0, FakeDriver(limit_bytes=4 * MIB))
    pool = SegmentPool(64 * MIB, lambda: missing.append(1), memory)
    tensors = [pool.allocate((MIB,), torch.uint8) for _ in range(3)]
    assert [pool.find(each) is not None for each in tensors] == [True, True, False]
    assert (len(missing), pool.reserved_bytes) == (1, 2 * MIB)


# -- processes -----------------------------------------------------------------------------------------------------------------


def produce(kind: str, sock: int) -> None:
    """In a forked process: lend three segments, and wait for the end."""
    connection = socket.socket(fileno=sock)
    pool = SegmentPool(64 * MIB, memory=KINDS[kind]())
    kept = [lent(pool, (value + 1) * MIB, value) for value in range(3)]
    for value, (tensor, segment) in enumerate(kept):
        head = json.dumps([segment.size, tensor.nbytes, value]).encode()
        socket.send_fds(connection, [head], [segment.fd])
    connection.recv(1)


def consume(kind: str, writes: bool, sock: int) -> None:
    """In a forked process: open a block, report its first byte, and wait for the end."""
    connection = socket.socket(fileno=sock)
    view = opened(Mappings(KINDS[kind]()), *socket.recv_fds(connection, 100, 1)[:2])[0]
    connection.send(bytes([int(view[0])]))
    connection.recv(1)
    if writes:
        view.fill_(9)


def opened(mappings: Mappings, head: bytes, fds: list[int]) -> tuple[Tensor, int]:
    """A view of a received block, and the value of its bytes."""
    block_bytes, size, value = json.loads(head)
    view = mappings.view(fds[0], block_bytes, 0, size, ignore)
    os.close(fds[0])
    return view, value


def start(function: str, *arguments: Any) -> tuple[ForkedProcess, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(PATIENCE_S)
    with theirs, open(os.devnull, "wb") as log:
        process = ForkedProcess(NURSERY.fork(f"{__name__}:{function}", [*arguments], log.fileno(), theirs.fileno()))
    return process, ours


@each_kind
def test_views_are_intact_and_blocks_can_be_opened_after_the_producer_was_killed(kind: str) -> None:
    process, connection = start("produce", kind)
    mappings = Mappings(KINDS[kind]())
    with connection:
        messages = [socket.recv_fds(connection, 100, 1)[:2] for _ in range(3)]
        found = [opened(mappings, *messages[0])]
        process.kill()
        assert connection.recv(1) == b"", "the kernel closes the connection"
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        found += [opened(mappings, *message) for message in messages[1:]]
    for view, value in found:
        assert view.numel() == (value + 1) * MIB
        assert bool((view == value).all())


@each_kind
@pytest.mark.parametrize("writes", [False, True])
def test_memory_is_unchanged_and_freed_when_the_consumer_was_killed_or_writes_to_it(kind: str, writes: bool) -> None:
    pool = SegmentPool(8 * MIB, memory=KINDS[kind]())
    process, connection = start("consume", kind, writes)
    with connection:
        tensor, segment = lent(pool, MIB, 7)
        socket.send_fds(connection, [json.dumps([segment.size, tensor.nbytes, 7]).encode()], [segment.fd])
        assert connection.recv(1) == b"\7"
        if writes:
            connection.send(b".")
        else:
            process.kill()
        assert connection.recv(1) == b"", "the kernel closes the connection: the lease ends"
        assert process.wait(PATIENCE_S) == (-signal.SIGSEGV if writes else -signal.SIGKILL)
    assert bool((tensor == 7).all())
    del tensor
    assert pool.reserved_bytes == MIB
    pool.release(segment, retire=True)
    assert pool.reserved_bytes == 0
