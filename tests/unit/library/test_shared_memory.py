"""Connections through shared memory: what is copied, what is released when, and what is refused."""

import array
import asyncio
import errno
import fcntl
import mmap
import os
import resource
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from multiworld import WorldManager
from multiworld.membership import listeners
from multiworld.membership.listeners import bind_local, default_runtime_dir
from multiworld.ops.operation import Operation, View
from multiworld.ops.p2p import recv_view, send_message
from multiworld.transport.memory import HostMemory, Register
from multiworld.transport.segments import MIN_BYTES, SegmentPool
from multiworld.transport.shared import RING_BYTES, SLOT_BYTES, SharedPayloads
from multiworld.transport.wire import (
    HEAD,
    IN_PLACE,
    IN_RING,
    MESSAGE,
    PIECE,
    PIECE_DONE,
    RECV_READY,
    RELEASE,
    RING,
    pack_head,
)
from tests.integration.members import form
from tests.unit.library.test_peer_connection import FACTS, End, heard
from tests.waiting import until

MIB = 1 << 20
BUDGET = 64 * MIB
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a short path, because that of a Unix socket has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="mw") as folder:
        yield Path(folder)


class LocalEnd(End):
    """A connection through shared memory and the calls of its world."""

    def __init__(self, sock: socket.socket, budget_bytes: int = BUDGET, register: Register | None = None) -> None:
        self.pool = SegmentPool(budget_bytes, memory=HostMemory(register), keep_mappings=register is not None)
        self.payloads = SharedPayloads(self.pool)
        super().__init__(sock, self.payloads)

    def send_message(self, payload: Tensor) -> Operation:
        message = send_message(FACTS, b"header", payload, 1, 0)
        return self.start(message, pack_head(MESSAGE, 0, payload.nbytes, b"header"), payload)

    def view(self) -> tuple[View, Operation]:
        view = View(lambda _header, _size_bytes: None)
        return view, self.start(recv_view(FACTS, view, 1, 0))


Pair = tuple[LocalEnd, LocalEnd]
OneEnd = tuple[LocalEnd, socket.socket]
"""A connection, and the plain socket at the other end of it."""


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    one, other = map(LocalEnd, socket.socketpair())
    yield one, other
    for end in (one, other):
        end.connection.close()


@pytest.fixture
async def end() -> AsyncIterator[OneEnd]:
    ours, theirs = socket.socketpair()
    made = LocalEnd(ours)
    theirs.setblocking(False)
    with theirs:
        yield made, theirs
        made.connection.close()


def random_bytes(size: int) -> Tensor:
    return torch.randint(0, 255, (size,), dtype=torch.uint8)


def allocated(end: LocalEnd, size: int) -> Tensor:
    tensor = end.pool.allocate((size,), torch.uint8)
    return tensor.copy_(random_bytes(size))


async def deliver(one: LocalEnd, other: LocalEnd, payload: Tensor) -> View:
    """Send a message. Returns what the other end receives, when both ends have completed it and keep nothing of it."""
    view, received = other.view()
    await one.until_completed(one.send_message(payload))
    await other.until_completed(received)
    one.owner.completed.clear()
    other.owner.completed.clear()
    return view


def leases(end: LocalEnd) -> int:
    return len(end.payloads._leases)


@pytest.mark.parametrize("size", [MIN_BYTES - 1, MIN_BYTES, SLOT_BYTES, RING_BYTES + 1, 9 * MIB])
@pytest.mark.parametrize("in_place", [True, False])
async def test_bytes_arrive_when_they_are_sent_both_ways_at_once(pair: Pair, size: int, in_place: bool) -> None:
    tensors = [allocated(each, size) if in_place else random_bytes(size) for each in pair]
    targets = [torch.zeros(size, dtype=torch.uint8) for _ in pair]
    sends = [each.send(tensor) for each, tensor in zip(pair, tensors, strict=True)]
    receives = [each.receive(target) for each, target in zip(pair, targets, strict=True)]
    for each, send, receive in zip(pair, sends, receives, strict=True):
        await each.until_completed(send, receive)
    assert torch.equal(targets[0], tensors[1])
    assert torch.equal(targets[1], tensors[0])
    await until(lambda: leases(pair[0]) + leases(pair[1]) == 0)


async def test_pieces_arrive_on_the_event_loop_after_a_thread_has_received(pair: Pair) -> None:
    """The message that arrives is then the only reason to poll the connection."""
    sender, receiver = pair
    assert receiver.connection.claim()
    receiver.connection.release()
    data, target = random_bytes(2 * RING_BYTES + 1), torch.zeros(2 * RING_BYTES + 1, dtype=torch.uint8)
    received = receiver.receive(target)
    sender.send(data)
    await receiver.until_completed(received)
    assert torch.equal(target, data)


async def test_segment_is_used_again_only_after_the_tensor_and_all_views_are_dropped(
    pair: Pair,
) -> None:
    one, other = pair
    tensor = allocated(one, MIB)
    expected, address = tensor.clone(), tensor.data_ptr()
    view = await deliver(one, other, tensor[5:])  # not at the start of a page
    assert view.shared
    assert torch.equal(view.data, expected[5:])
    assert view.header.rstrip(b"\0") == b"header"
    part = view.data[7:].view(torch.uint8)
    part.add_(1)  # changes only the memory of the receiver
    assert torch.equal(tensor, expected)
    del tensor, view
    assert one.pool.allocate((MIB,), torch.uint8).data_ptr() != address
    del part
    await until(lambda: leases(one) == 0)
    assert address in {one.pool.allocate((MIB,), torch.uint8).data_ptr() for _ in range(2)}


async def test_receiver_gets_the_bytes_of_the_call_when_the_sender_overwrites_a_tensor_after_its_send(
    pair: Pair,
) -> None:
    """A message lends its payload and is complete when it is announced. A send has copied its tensor when it is complete or has failed."""
    one, other = pair
    tensor, target = allocated(one, MIB), torch.zeros(MIB, dtype=torch.uint8)
    expected = tensor.clone()
    received = other.receive(target)
    await until(lambda: one.connection.queues._credits.get(0) == 1)
    sent = one.send(tensor)
    await one.until_completed(sent)
    assert received not in other.owner.completed, "the receiver has not run yet"
    tensor.fill_(0)
    assert not leases(one)
    await other.until_completed(received)
    assert torch.equal(target, expected)
    view, received = other.view()
    await until(lambda: one.connection.queues._credits.get(0) == 1)
    assert one.send_message(tensor) in one.owner.completed
    await other.until_completed(received)
    assert view.shared


class RefusingSocket:
    """A socket whose kernel passes no descriptor once."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.refused = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendmsg(self, buffers: Any, ancillary: Any = ()) -> int:
        if ancillary and not self.refused:
            self.refused += 1
            raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")
        return self._sock.sendmsg(buffers, ancillary)


@pytest.mark.parametrize("with_ring", [False, True])
async def test_message_is_copied_when_too_many_descriptors_are_in_flight(pair: Pair, with_ring: bool) -> None:
    one, other = pair
    if with_ring:
        received = other.receive(torch.empty(MIB, dtype=torch.uint8))
        await one.until_completed(one.send(random_bytes(MIB)))
        await other.until_completed(received)
    refusing = RefusingSocket(one.connection.sock)
    one.connection.sock = refusing  # type: ignore[assignment]
    tensors, views = [allocated(one, MIB) for _ in range(3)], [other.view() for _ in range(3)]
    await until(lambda: one.connection.queues._credits.get(0) == 3)
    sends = [one.send_message(tensor) for tensor in tensors]
    await one.until_completed(*sends)
    await other.until_completed(*(received for _, received in views))
    assert refusing.refused == 1
    assert [view.shared for view, _ in views] == [False, True, True]
    assert all(torch.equal(tensor, view.data) for tensor, (view, _) in zip(tensors, views, strict=True))


async def test_view_stays_intact_when_the_connection_and_the_tensor_of_the_sender_end(
    pair: Pair,
) -> None:
    one, other = pair
    tensor = allocated(one, MIB)
    expected = tensor.clone()
    view = await deliver(one, other, tensor)
    one.connection.close()
    del tensor
    assert one.pool.reserved_bytes == 0  # no tensor may lie in a segment that a lost receiver may still read
    one.pool.allocate((MIB,), torch.uint8).fill_(1)
    assert torch.equal(view.data, expected)


async def test_view_is_copied_and_the_segment_is_released_when_it_cannot_be_mapped(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    tensor = allocated(one, MIB)
    view, received = other.view()
    monkeypatch.setattr(mmap, "mmap", Mock(side_effect=OSError))
    one.send_message(tensor)
    await other.until_completed(received)
    await until(lambda: not leases(one))
    assert torch.equal(view.data, tensor)


async def test_data_goes_through_the_socket_when_the_budget_is_used_up() -> None:
    ours, theirs = socket.socketpair()
    one, other = LocalEnd(ours, budget_bytes=MIB), LocalEnd(theirs)
    kept = one.pool.allocate((MIB,), torch.uint8)
    assert one.pool.find(kept) is not None
    tensor = one.pool.allocate((3 * MIB,), torch.uint8).copy_(random_bytes(3 * MIB))
    assert one.pool.find(tensor) is None
    view = await deliver(one, other, tensor)
    assert not view.shared
    assert torch.equal(view.data, tensor)
    assert one.pool.reserved_bytes <= MIB
    for each in (one, other):
        each.connection.close()


async def test_memory_of_a_peer_is_registered_once_and_its_views_outlive_the_connection() -> None:
    """As a worker with a GPU receives: the messages of one segment use one mapping."""
    registered, undone = list[tuple[int, bool]](), list[int]()

    def register(address: int, size: int, is_writable: bool) -> Callable[[], None]:
        registered.append((size, is_writable))
        return lambda: undone.append(size)

    ours, theirs = socket.socketpair()
    one, other = LocalEnd(ours), LocalEnd(theirs, register=register)
    for number in range(3):
        tensor = allocated(one, MIB)
        view = await deliver(one, other, tensor[5:])
        assert view.shared
        data, expected = view.data, tensor[5:].clone()
        assert torch.equal(data, expected)
        assert leases(one) == 1
        del tensor, view
        if number < 2:
            del data
            await until(lambda: leases(one) == 0)
    assert registered == [(MIB, False)]
    for each in (one, other):
        each.connection.close()
    assert torch.equal(data, expected)
    assert not undone
    del data
    assert undone == [MIB]


def test_memory_of_segments_is_registered_until_it_is_freed() -> None:
    registered: dict[int, int] = {}

    def register(address: int, size: int, is_writable: bool) -> Callable[[], None]:
        registered[address] = size
        return lambda: registered.__delitem__(address)

    pool = SegmentPool(4 * MIB, memory=HostMemory(register))
    first = pool.allocate((MIB,), torch.uint8)
    assert registered == {first.data_ptr(): MIB}
    del first
    again = pool.allocate((MIB,), torch.uint8)
    assert len(registered) == 1, "the segment is used again"
    pool.close()
    assert registered == {again.data_ptr(): MIB}, "a tensor uses the memory"
    del again
    assert not registered


def test_forked_child_does_not_use_the_segments_of_its_parent() -> None:
    pool = SegmentPool(BUDGET)
    address = pool.allocate((MIB,), torch.uint8).data_ptr()  # kept for the next tensor
    pid = os.fork()
    if pid == 0:
        os._exit(0 if pool.reserved_bytes == 0 and not pool._kept else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert pool.allocate((MIB,), torch.uint8).data_ptr() == address


# -- hostile peers -------------------------------------------------------------------------------------------------------------


def memfd(size: int, seals: int = SEALS) -> int:
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def pass_fd(sock: socket.socket, data: bytes, fd: int) -> None:
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
    os.close(fd)


def in_place(offset: int = 0) -> bytes:
    return HEAD.pack(IN_PLACE, 0, MIB, b"", 1, offset)


RING_HEAD = pack_head(RING, 0, RING_BYTES)
RING_MESSAGE = pack_head(IN_RING, 0, MIB)
MANY_PIECES = pack_head(PIECE) * (MIB // SLOT_BYTES + 1)


DESCRIPTORS: dict[str, Callable[[], int]] = {
    "file": lambda: os.open(__file__, os.O_RDONLY),
    "growing": lambda: memfd(MIB, seals=fcntl.F_SEAL_GROW),
    "small": lambda: memfd(MIB - 1),
    "good": lambda: memfd(MIB),
    "ring": lambda: memfd(RING_BYTES),
}
HOSTILE = [
    pytest.param("file", in_place(), "not shared memory", id="regular file"),
    pytest.param("growing", in_place(), "size can change", id="not sealed against truncation"),
    pytest.param("small", in_place(), "of a segment of", id="too small"),
    pytest.param("good", in_place(1), "of a segment of", id="offset out of range"),
    pytest.param("ring", RING_HEAD + RING_MESSAGE + MANY_PIECES, "piece", id="more pieces than announced"),
    pytest.param("", in_place(), "sent none", id="no descriptor"),
    pytest.param("", RING_HEAD, "sent none", id="ring without descriptor"),
    pytest.param("", pack_head(RING, 0, 1 << 50), "a ring of", id="ring of another size"),
    pytest.param("", RING_MESSAGE, "not ready", id="message without ring"),
    pytest.param("", pack_head(PIECE), "no message", id="piece without message"),
    pytest.param("", pack_head(PIECE_DONE), "does not have", id="piece that was never sent"),
    pytest.param("", pack_head(RELEASE, lease=1), "does not have", id="lease that was never given"),
    pytest.param("", pack_head(200, 0, 1), "invalid data", id="unknown kind"),
]


@pytest.mark.parametrize(("descriptor", "frames", "reason"), HOSTILE)
async def test_world_breaks_when_the_peer_violates_the_protocol(
    end: OneEnd, descriptor: str, frames: bytes, reason: str
) -> None:
    made, peer = end
    made.view()
    await heard(peer, HEAD.size)
    before = len(os.listdir("/proc/self/fd"))
    if descriptor:
        pass_fd(peer, frames, DESCRIPTORS[descriptor]())
    else:
        peer.send(frames)
    await until(lambda: bool(made.owner.protocol_errors))
    assert reason in made.owner.protocol_errors[0]
    made.connection.close()
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_world_breaks_when_descriptors_come_without_frames(end: OneEnd) -> None:
    made, peer = end
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        pass_fd(peer, pack_head(RECV_READY), memfd(MIB))
    await until(lambda: bool(made.owner.protocol_errors))
    made.connection.close()
    assert len(os.listdir("/proc/self/fd")) <= before


# -- the Unix socket -----------------------------------------------------------------------------------------------------------


def sockets(runtime_dir: Path) -> list[Path]:
    return list(runtime_dir.glob("*/*"))


@pytest.mark.parametrize("switched_off", [True, False], ids=["switched off", "not in the same container"])
async def test_members_use_tcp_when_one_of_them_cannot_reach_the_socket(tmp_path: Path, switched_off: bool) -> None:
    async with (
        WorldManager(runtime_dir=str(tmp_path)) as one,
        WorldManager(runtime_dir=str(tmp_path), shared_memory_bytes=0 if switched_off else None) as other,
    ):
        port = one.listen()
        opening = asyncio.create_task(one.initialize_world("w", 0, 2, port=port))
        await until(lambda: bool(sockets(tmp_path)))
        sockets(tmp_path)[0].unlink()
        worlds = [await other.initialize_world("w", 1, 2, port=port), await opening]
        assert {world.transport for world in worlds} == {"tcp"}
        received = torch.empty(MIB, dtype=torch.uint8)
        sent = one.allocate((MIB,), torch.uint8).fill_(3)
        await asyncio.gather(other.communicator.send(sent, 0, "w"), one.communicator.recv(received, 1, "w"))
        assert torch.equal(sent, received)


async def test_members_use_shared_memory_when_they_share_a_host(tmp_path: Path) -> None:
    async with WorldManager(runtime_dir=str(tmp_path)) as one, WorldManager(runtime_dir=str(tmp_path)) as other:
        await form("w", one.listen(), one, other)
        assert [manager.world("w").transport for manager in (one, other)] == ["shared memory"] * 2
    assert not sockets(tmp_path)


def test_socket_is_refused_when_its_folder_is_not_private(tmp_path: Path) -> None:
    bind_local(str(tmp_path)).close()
    next(tmp_path.iterdir()).chmod(0o720)
    with pytest.raises(PermissionError, match="0700"):
        bind_local(str(tmp_path))
    long = tmp_path / ("x" * 120)
    long.mkdir()
    with pytest.raises(OSError, match="too long"):
        bind_local(str(long))


def test_folder_for_sockets_is_found_when_no_folder_is_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MULTIWORLD_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    assert default_runtime_dir()


def test_folder_for_sockets_has_a_path_that_is_short_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.delenv("MULTIWORLD_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_runtime_dir() == str(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert default_runtime_dir() == str(tmp_path)
    monkeypatch.setenv("TMPDIR", str(long))
    assert default_runtime_dir() == "/tmp"
    bind_local(default_runtime_dir()).close()
    monkeypatch.setenv("MULTIWORLD_RUNTIME_DIR", str(long))
    assert default_runtime_dir() == str(long), "a folder that was asked for is not replaced"


def test_tensors_are_in_ordinary_memory_when_the_system_has_no_shared_memory(caplog: pytest.LogCaptureFixture) -> None:
    missing = []
    pool = SegmentPool(BUDGET, lambda: missing.append(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        tensors = [pool.allocate((MIB,), torch.uint8) for _ in range(3)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(missing) == 3
    assert [pool.find(tensor) for tensor in tensors] == [None] * 3
    assert pool.reserved_bytes == 0
    assert [record.getMessage() for record in caplog.records] == [
        "no shared memory for 1048576 bytes, the data is copied: [Errno 27] File too large"
    ], "once in ten seconds"
    assert pool.find(pool.allocate((MIB,), torch.uint8)) is not None


def test_socket_of_a_killed_process_is_deleted_by_the_next_one(tmp_path: Path) -> None:
    abandoned, alive = bind_local(str(tmp_path)), bind_local(str(tmp_path))
    abandoned.close()
    for sock in (Path(name) for name in next(tmp_path.iterdir()).iterdir()):
        os.utime(sock, (0, 0))
    listeners._delete_abandoned.cache_clear()  # as in another process
    with bind_local(str(tmp_path)) as third, alive:
        names = {str(path) for path in next(tmp_path.iterdir()).iterdir()}
        assert names == {alive.getsockname(), third.getsockname()}
