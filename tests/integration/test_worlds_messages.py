"""Point-to-point messages under concurrency, blocked receivers, failures during a transfer, and unauthenticated connections."""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import stat
import struct
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from multiworld import BrokenWorldException, Cause, JoinError, World, WorldClosedError, WorldManager, WorldState
from multiworld.control.frames import FrameReader
from multiworld.control.handshake import ClientHandshake, Hello
from multiworld.transport import connection as line
from tests.integration.crew import Crew
from tests.integration.members import PATIENCE_S, Member, Spawn, form
from tests.waiting import until

BIG = 10_000_000
"""float32: 40 MB, larger than all buffers on the path."""
PATIENT_S = 30.0
PULSE_S = 2.0
MEMBER_SETTINGS = {"heartbeat_timeout_s": PULSE_S}


@pytest.fixture
async def manager(request: pytest.FixtureRequest) -> AsyncIterator[WorldManager]:
    shared_memory_bytes = getattr(request, "param", None)
    async with WorldManager(heartbeat_timeout_s=PULSE_S, shared_memory_bytes=shared_memory_bytes) as made:
        yield made


# -- concurrent messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, BIG // 4], ids=["small", "large"])
def test_messages_are_matched_by_tag_in_any_order(crew: Crew, count: int) -> None:
    """Sent in one order and received in the opposite order, without blocking each other."""

    async def part(manager: WorldManager, world: World) -> None:
        here, name = manager.communicator, world.name
        if world.rank == 0:
            sends = [here.isend(torch.full((count,), float(tag)), 1, name, tag=tag) for tag in range(4)]
            for operation in sends:
                await operation
        else:
            for tag in (2, 3, 1, 0):
                tensor = torch.zeros(count)
                await here.recv(tensor, 0, name, tag=tag)
                assert tensor[0] == tensor[-1] == tag

    crew.run(2, part)


def test_messages_without_a_receiver_are_not_buffered(crew: Crew) -> None:
    async def part(manager: WorldManager, world: World) -> None:
        here, name = manager.communicator, world.name
        if world.rank == 0:
            sends = [here.isend(torch.full((1,), float(tag)), 1, name, tag=tag) for tag in range(3000)]
            await here.barrier(name)
            assert not any(operation.done() for operation in sends)
            await here.barrier(name)
            for operation in sends:
                await operation
        else:
            await here.barrier(name)
            await here.barrier(name)
            for tag in reversed(range(3000)):
                tensor = torch.zeros(1)
                await here.recv(tensor, 0, name, tag=tag)
                assert tensor.item() == tag

    crew.run(2, part)


@pytest.mark.parametrize("size", [2, 4])
def test_all_members_can_send_large_messages_before_receiving(crew: Crew, size: int) -> None:
    async def part(manager: WorldManager, world: World) -> None:
        here, name, count = manager.communicator, world.name, 3_000_000
        peers = [rank for rank in range(size) if rank != world.rank]
        sends = [
            here.isend(torch.full((count,), float(10 * world.rank + step)), peer, name)
            for step in range(3)
            for peer in peers
        ]
        await asyncio.sleep(0.1)
        for step in range(3):
            for peer in peers:
                tensor = torch.zeros(count)
                await here.recv(tensor, peer, name)
                assert tensor[0] == tensor[-1] == 10 * peer + step
        for operation in sends:
            await operation

    crew.run(size, part)


def test_continuous_sender_does_not_starve_the_event_loop(crew: Crew) -> None:
    async def part(manager: WorldManager, world: World) -> None:
        here, name, total = manager.communicator, world.name, 2000
        if world.rank == 1:
            for operation in [here.irecv(torch.zeros(1), 0, name) for _ in range(total)]:
                await operation
            return
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        for _ in range(total):
            await here.send(torch.zeros(1), 1, name)
        counting.cancel()
        assert turns >= total

    crew.run(2, part)


# -- event loops -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def another_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def test_operations_of_one_world_run_from_several_loops(spawn: Spawn, manager: WorldManager) -> None:
    peer = await spawn()
    await form("w", manager.listen(), manager, peer)

    async def exchange(tags: range) -> list[float]:
        got = []
        for tag in tags:
            await manager.communicator.send(torch.full((50_000,), float(tag)), 1, "w", tag=tag)
            tensor = torch.zeros(50_000)
            await manager.communicator.recv(tensor, 1, "w", tag=tag)
            got += sorted(set(tensor.tolist()))
        return got

    answers = [peer.start("return_what_comes", world="w", peer=0, count=50_000, tag=tag) for tag in range(60)]
    with another_loop() as loop:
        there = asyncio.run_coroutine_threadsafe(exchange(range(30)), loop)
        here = await exchange(range(30, 60))
        assert await asyncio.wrap_future(there) == [float(tag) for tag in range(30)]
    assert here == [float(tag) for tag in range(30, 60)]
    await asyncio.gather(*answers)


async def test_world_outlives_the_loop_that_formed_it(spawn: Spawn, manager: WorldManager) -> None:
    peer = await spawn()
    port = manager.listen()
    with another_loop() as loop:
        joining = peer.start("join", world="w", rank=1, size=2, port=port)
        forming = manager.initialize_world("w", 0, 2, port=port)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(forming, loop))
        await joining
    for value in (1.0, 2.0):
        coming = peer.start("recv", world="w", src=0)
        await manager.communicator.send(torch.full((4,), value), 1, "w")
        assert await coming == [value]


async def test_message_arrives_when_the_receivers_loop_is_blocked_while_the_sender_leaves(
    spawn: Spawn, manager: WorldManager
) -> None:
    sleeper = await spawn()
    await form("w", manager.listen(), manager, sleeper)
    coming = sleeper.start("recv", world="w", src=0)
    await sleeper.do("threads")  # it is waiting by now
    sleeping = sleeper.start("block", seconds=3.0)
    await until(lambda: "stands still" in sleeper.complaints)
    await manager.communicator.send(torch.full((4,), 5.0), 1, "w")
    await manager.close_world("w")
    assert await coming == [5.0]
    await sleeping


# -- failures during a transfer ------------------------------------------------------------------------------------------------

FAULTS = [
    pytest.param(signal.SIGKILL, Cause.EXIT, id="killed"),
    pytest.param(signal.SIGSTOP, Cause.HANG, id="frozen"),
]


@pytest.mark.parametrize(("signum", "cause"), FAULTS)
@pytest.mark.parametrize("sends", [True, False], ids=["sender", "receiver"])
@pytest.mark.parametrize("manager", [0, None], ids=["tcp", "shared memory"], indirect=True)
async def test_survivor_gets_cause_and_rank_when_its_peer_fails_during_a_message(
    spawn: Spawn,
    manager: WorldManager,
    signum: signal.Signals,
    cause: Cause,
    sends: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(line, "_EVENT_BYTES", 1 << 16)  # 40 MB, so that the transfer takes long enough
    victim = await spawn()
    await form("w", manager.listen(), manager, victim)
    neighbour = await spawn()
    await form("v", manager.listen(), manager, neighbour)
    ours = manager.world("w")._operations._connections[1]
    if sends:
        operation = manager.communicator.irecv(torch.zeros(BIG), 1, "w")
        victim.start("send", world="w", dst=0, count=BIG)
        await until(lambda: ours._filled > 0 or getattr(ours, "_slotted_bytes", 0) > 0)
        victim.signal(signum)
    else:
        victim.start("recv", world="w", src=0, count=BIG)
        await victim.do("threads")
        victim.signal(signal.SIGSTOP)
        await victim.stopped()
        operation = manager.communicator.isend(torch.zeros(BIG), 1, "w")
        await until(lambda: ours._partly_written or ours._waiting)
        victim.signal(signum)
    with pytest.raises(BrokenWorldException) as raised:
        await operation
    assert (raised.value.cause, raised.value.rank) == (cause, 1)
    coming = neighbour.start("recv", world="v", src=0)
    await manager.communicator.send(torch.ones(4), 1, "v")
    assert await coming == [1.0]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("signum", "cause"), FAULTS)
@pytest.mark.parametrize("connected", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("victim_rank", [1, 2])
async def test_world_breaks_when_a_member_fails_while_peers_connect(
    spawn: Spawn, manager: WorldManager, victim_rank: int, connected: bool, signum: signal.Signals, cause: Cause
) -> None:
    port = manager.listen()
    warm = await spawn()
    await form("warm", port, manager, warm)  # the state that the first world creates is kept
    await manager.close_world("warm")
    before = _descriptors()
    victim, other = await spawn(), await spawn()
    spawned = _descriptors() - before
    await victim.do("freeze_while_connecting", connected=connected)
    ranks: dict[int, Member] = {victim_rank: victim, 3 - victim_rank: other}
    joining = [member.start("join", world="w", rank=rank, size=3, port=port) for rank, member in ranks.items()]
    forming = asyncio.create_task(manager.initialize_world("w", 0, 3, port=port))
    await victim.stopped()
    victim.signal(signum)
    with contextlib.suppress(
        BrokenWorldException, JoinError
    ):  # it still forms if only the victim's side was incomplete
        await forming
    with pytest.raises(BrokenWorldException) as raised:
        await manager.communicator.recv(torch.zeros(4), victim_rank, "w")
    assert (raised.value.cause, raised.value.rank) == (cause, victim_rank)
    with contextlib.suppress(BrokenWorldException, JoinError):
        await joining[1]
    with pytest.raises(BrokenWorldException):
        await other.do("recv", world="w", src=victim_rank)
    for world in manager._ended:
        assert await asyncio.to_thread(world.reclaimed.wait, PATIENCE_S)
    await until(lambda: _descriptors() <= before + spawned)


async def test_peer_port_tolerates_unauthenticated_connections_and_closes_when_the_world_has_formed(
    spawn: Spawn,
) -> None:
    """Rank 1's port is open until rank 2 has connected."""
    victim = await spawn(secret="right", heartbeat_timeout_s=PATIENT_S)
    await victim.do("freeze_while_connecting", connected=False)
    first, second = (WorldManager(secret="right", heartbeat_timeout_s=PATIENT_S) for _ in range(2))
    async with first, second:
        port = first.listen()
        joining = victim.start("join", world="w", rank=2, size=3, port=port)
        forming = [
            asyncio.create_task(manager.initialize_world("w", rank, 3, port=port))
            for rank, manager in enumerate((first, second))
        ]
        await victim.stopped()
        address = None
        async with asyncio.timeout(PATIENCE_S):
            while address is None or address.fileno() < 0:
                await asyncio.sleep(0.01)
                mesh = second.world("w").bootstrap.mesh
                value = second.world("w")._store._values.get("multiworld/address/1") if mesh is not None else None
                if value is not None:
                    line_port = int(value.split()[0])
                    address = socket.create_connection(("127.0.0.1", line_port))
        strangers = [address]  # silent
        for greeting in (os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\0\0\0\x01\x07"):
            strangers.append(socket.create_connection(("127.0.0.1", line_port)))
            strangers[-1].sendall(greeting)
        formation = second.world("w").bootstrap.mesh.formation  # type: ignore[union-attr]
        for secret, hello, words in (
            ("wrong", Hello("w", 2, 3, 1, peer=1), b"wrong secret"),
            ("right", Hello("another", 2, 3, 1, peer=1), b"does not form here"),
            ("right", Hello("w", 2, 3, 2, peer=1), b"does not form here"),
            ("right", Hello("w", 2, 4, 1, peer=1), b"rank 2 of 4 must not connect to rank 1 of 3"),
            ("right", Hello("w", 1, 3, 1, peer=1), b"rank 1 of 3 must not connect"),
            ("right", Hello("w", 2, 3, 1, peer=0), b"this is rank 1, not 0"),
            ("right", Hello("w", 2, 3, 1, peer=1, formation=formation[::-1]), b"does not form that world any more"),
        ):
            rejection = await asyncio.to_thread(_ask_for_a_line, line_port, secret.encode(), hello)
            assert words in rejection
        victim.signal(signal.SIGCONT)
        worlds = await asyncio.gather(*forming)
        assert all(world.state is WorldState.READY for world in worlds)
        await joining  # it may be ready later than the others, and accepts no message before
        coming = victim.start("recv", world="w", src=1)
        await second.communicator.send(torch.ones(4), 2, "w")
        assert await coming == [1.0]
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionRefusedError):
                while True:
                    socket.create_connection(("127.0.0.1", line_port)).close()
                    await asyncio.sleep(0.01)
        for stranger in strangers:
            stranger.close()


def _ask_for_a_line(port: int, secret: bytes, hello: Hello) -> bytes:
    """The reason for the rejection."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
        frames, handshake = FrameReader(), ClientHandshake(secret, hello)
        (challenge,) = frames.feed(sock.recv(1 << 12))
        sock.sendall(handshake.hello(challenge).encode())
        (rejection,) = frames.feed(sock.recv(1 << 12))
        return rejection.fields[0]


@contextlib.contextmanager
def data_sockets() -> Iterator[list[socket.socket]]:
    """Duplicates of the data connections of this process over TCP. Only they use keepalive."""
    with contextlib.ExitStack() as stack:
        found = []
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    sock = stack.enter_context(socket.socket(fileno=os.dup(fd)))
                    if sock.family == socket.AF_INET and sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
                        found.append(sock)
        assert found
        yield found


def drop_incoming(sock: socket.socket) -> None:
    """Let the kernel drop all packets for this socket without an acknowledgement, like a firewall that has forgotten the connection."""
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET: keep 0 bytes
    program = struct.pack("HL", 1, ctypes.addressof(instruction))
    sock.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER


async def test_world_breaks_when_the_network_drops_data_while_heartbeats_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(line, "UNACKNOWLEDGED_S", 1.0)
    async with (
        WorldManager(heartbeat_timeout_s=PATIENT_S, shared_memory_bytes=0) as host,
        WorldManager(heartbeat_timeout_s=PATIENT_S, shared_memory_bytes=0) as guest,
    ):
        await form("w", host.listen(), host, guest)
        with data_sockets() as socks:
            for sock in socks:
                drop_incoming(sock)
        async with asyncio.timeout(PATIENT_S):
            with pytest.raises(BrokenWorldException) as caught:
                await guest.communicator.recv(torch.zeros(4), 0, "w")
        assert caught.value.cause is Cause.TRANSPORT


async def test_slow_receiver_does_not_count_as_a_lost_network(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "UNACKNOWLEDGED_S", 0.2)
    monkeypatch.setattr("multiworld.world._WATCH_S", 0.1)
    peer = await spawn(heartbeat_timeout_s=PATIENT_S, shared_memory_bytes=0)
    async with WorldManager(heartbeat_timeout_s=PATIENT_S, shared_memory_bytes=0) as manager:
        await form("w", manager.listen(), manager, peer)
        coming = peer.start("recv", world="w", src=0, count=BIG)
        peer.start("block", seconds=2.0)
        await until(lambda: "stands still" in peer.complaints)
        await manager.communicator.send(torch.ones(BIG), 1, "w")
        assert await coming == [1.0]


async def test_other_worlds_stay_when_a_callback_blocks_while_its_peer_dies(
    spawn: Spawn, manager: WorldManager
) -> None:
    """The thread that sends the heartbeats of all worlds never waits for the code of a caller."""
    member, victim = await spawn(), await spawn()
    await form("w", await member.do("listen"), member, victim)
    await form("v", manager.listen(), manager, member)
    receiving = member.start("recv_slowly", world="w", src=1, seconds=2.5 * PULSE_S)
    victim.start("send", world="w", dst=0)
    await until(lambda: "stands still" in member.complaints)
    victim.kill()
    with contextlib.suppress(BrokenWorldException):
        await receiving
    coming = member.start("recv", world="v", src=0)
    await manager.communicator.send(torch.ones(4), 1, "v")
    assert await coming == [1.0]


@pytest.mark.parametrize("shared_memory_bytes", [None, 0], ids=["shared memory", "tcp"])
async def test_completed_sends_arrive_when_the_sender_leaves_with_a_receive_pending(
    shared_memory_bytes: int | None,
) -> None:
    settings: dict[str, Any] = {"heartbeat_timeout_s": PATIENT_S, "shared_memory_bytes": shared_memory_bytes}
    async with WorldManager(**settings) as host, WorldManager(**settings) as guest:
        port = host.listen()
        for round_ in range(4):
            await form("w", port, host, guest)
            pending = host.communicator.irecv(torch.zeros(4), 1, "w", tag=1)
            target = torch.zeros(1 << 19)
            coming = guest.communicator.irecv(target, 0, "w")
            await host.communicator.send(torch.full((1 << 19,), float(round_)), 1, "w")
            host.remove_world("w")
            time.sleep(0.3)  # noqa: ASYNC251 - the receiver is behind
            await coming
            assert set(target.tolist()) == {float(round_)}
            with pytest.raises(WorldClosedError):
                await pending
            await guest.close_world("w")


async def test_lost_connection_is_attributed_to_its_peer_when_a_later_collective_finds_it(spawn: Spawn) -> None:
    peer, third = [await spawn(enable_monitor=False, verify_collectives=False) for _ in range(2)]
    async with WorldManager(enable_monitor=False, verify_collectives=False, shared_memory_bytes=0) as manager:
        await form("w", manager.listen(), manager, third, peer)
        connection = manager.world("w")._operations._connections[2]
        peer.signal(signal.SIGSTOP)
        await peer.stopped()
        connection._sock.shutdown(socket.SHUT_RDWR)
        await until(lambda: connection.end_reason is not None)
        with pytest.raises(BrokenWorldException) as caught:
            await manager.communicator.all_reduce(torch.zeros(4), world_name="w")
        assert (caught.value.cause, caught.value.rank) == (Cause.TRANSPORT, 2)


async def test_lost_peer_connection_breaks_the_world_without_heartbeats(spawn: Spawn) -> None:
    peer = await spawn(enable_monitor=False)
    async with WorldManager(enable_monitor=False, shared_memory_bytes=0) as manager:
        await form("w", manager.listen(), manager, peer)
        peer.signal(signal.SIGSTOP)
        await peer.stopped()
        coming = asyncio.create_task(manager.communicator.recv(torch.zeros(4), 1, "w"))
        await asyncio.sleep(0)
        with data_sockets() as socks:
            for sock in socks:
                sock.shutdown(socket.SHUT_RDWR)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(BrokenWorldException) as caught:
                await coming
        assert (caught.value.cause, caught.value.rank) == (Cause.TRANSPORT, 1)


class _EagerTask:
    """Like `asyncio.eager_task_factory` of Python 3.12, for 3.11: the first step runs at once."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._yielded: Any = None
        self._ended: StopIteration | BaseException | None = None
        try:
            self._yielded = coroutine.send(None)
        except BaseException as error:  # noqa: BLE001 - raised by the task below
            self._ended = error

    async def rest(self) -> Any:
        if self._ended is None:
            return await self
        if isinstance(self._ended, StopIteration):
            return self._ended.value
        raise self._ended

    def __await__(self) -> Generator[Any, Any, Any]:
        yielded = self._yielded
        while True:
            if asyncio.isfuture(yielded):
                yielded._asyncio_future_blocking = True
            try:
                sent = yield yielded
            except BaseException as error:  # noqa: BLE001 - the coroutine's to handle
                step = partial(self._coroutine.throw, error)
            else:
                step = partial(self._coroutine.send, sent)
            try:
                yielded = step()
            except StopIteration as end:
                return end.value


def _eager_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
    return asyncio.Task(_EagerTask(coroutine).rest(), loop=loop, **options)


async def test_results_are_correct_with_an_eager_task_factory() -> None:
    loop = asyncio.get_running_loop()
    async with (
        WorldManager(heartbeat_timeout_s=PATIENT_S) as host,
        WorldManager(heartbeat_timeout_s=PATIENT_S) as guest,
    ):
        await form("w", host.listen(), host, guest)

        async def part(manager: WorldManager, rank: int, number: int) -> None:
            here, tensor = manager.communicator, torch.full((300,), float(number + rank))
            received = torch.zeros(50)
            sending = here.isend(torch.full((50,), float(number)), 1 - rank, "w", tag=number)
            receiving = here.irecv(received, 1 - rank, "w", tag=number)
            await here.all_reduce(tensor, world_name="w")
            await receiving
            await sending
            assert set(tensor.tolist()) == {2.0 * number + 1}
            assert set(received.tolist()) == {float(number)}

        loop.set_task_factory(getattr(asyncio, "eager_task_factory", _eager_task))
        try:
            async with asyncio.timeout(PATIENCE_S):
                for round_ in range(50):
                    numbers = range(4 * round_, 4 * round_ + 4)
                    pairs = [part(each, rank, number) for rank, each in enumerate((host, guest)) for number in numbers]
                    await asyncio.gather(*pairs)
        finally:
            loop.set_task_factory(None)
