"""Messages of several event loops, blocked receivers, failures during a transfer, and unauthenticated connections."""

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
from collections.abc import Iterator

import pytest
import torch

from multiworld import BrokenWorldException, Cause, JoinError, WorldClosedError, WorldManager
from multiworld.transport import tcp
from tests.integration.members import PATIENCE_S, Member, Spawn, form, managers
from tests.waiting import until

PULSE_S = 6.0
"""Heartbeat timeout: longer than the delays of a busy machine, and short enough for a test to wait for it."""
MEMBER_SETTINGS = {"heartbeat_timeout_s": PULSE_S}


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

FAULTS = [pytest.param(signal.SIGKILL, Cause.EXIT, id="killed"), pytest.param(signal.SIGSTOP, Cause.HANG, id="frozen")]


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
    # It still forms if only the victim's side was incomplete.
    with contextlib.suppress(BrokenWorldException, JoinError):
        await forming
    with pytest.raises(BrokenWorldException) as raised:
        await manager.communicator.recv(torch.zeros(4), victim_rank, "w")
    assert (raised.value.cause, raised.value.rank) == (cause, victim_rank)
    with contextlib.suppress(BrokenWorldException, JoinError):
        await joining[1]
    with pytest.raises(BrokenWorldException):
        await other.do("recv", world="w", src=victim_rank)
    for world in manager._created:
        assert await asyncio.to_thread(world.reclaimed.wait, PATIENCE_S)
    await until(lambda: _descriptors() <= before + spawned)


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
    monkeypatch.setattr(tcp, "MAX_RETRANSMISSIONS", 2)
    async with managers(2, shared_memory_bytes=0) as (host, guest):
        await form("w", host.listen(), host, guest)
        with data_sockets() as socks:
            for sock in socks:
                drop_incoming(sock)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(BrokenWorldException) as caught:
                await guest.communicator.recv(torch.zeros(4), 0, "w")
        assert caught.value.cause is Cause.TRANSPORT


async def test_other_worlds_stay_when_a_callback_blocks_while_its_peer_dies(
    spawn: Spawn, manager: WorldManager
) -> None:
    """The thread that sends the heartbeats of all worlds never waits for the code of a caller."""
    member, victim = await spawn(), await spawn()
    await form("w", await member.do("listen"), member, victim)
    await form("v", manager.listen(), manager, member)
    receiving = member.start("recv_slowly", world="w", src=1, seconds=1.25 * PULSE_S)
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
    async with managers(2, shared_memory_bytes=shared_memory_bytes) as (host, guest):
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


@pytest.mark.parametrize("operation", ["recv", "all_reduce"])
async def test_lost_peer_connection_breaks_the_world_without_heartbeats(spawn: Spawn, operation: str) -> None:
    peer = await spawn(enable_monitor=False)
    async with WorldManager(enable_monitor=False, shared_memory_bytes=0) as manager:
        await form("w", manager.listen(), manager, peer)
        peer.signal(signal.SIGSTOP)
        await peer.stopped()
        here, tensor = manager.communicator, torch.zeros(4)
        waiting = here.recv(tensor, 1, "w") if operation == "recv" else here.all_reduce(tensor, world_name="w")
        coming = asyncio.create_task(waiting)
        await asyncio.sleep(0)
        with data_sockets() as socks:
            for sock in socks:
                sock.shutdown(socket.SHUT_RDWR)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(BrokenWorldException) as caught:
                await coming
        assert (caught.value.cause, caught.value.rank) == (Cause.TRANSPORT, 1)


async def test_world_breaks_when_the_receiver_does_not_accept_the_header() -> None:
    def check(header: bytes, size_bytes: int) -> None:
        raise ValueError(f"{size_bytes} bytes are too many")

    async with managers(2) as (host, guest):
        await form("w", host.listen(), host, guest)
        host.world("w").start_send_message(b"", torch.zeros(5), 1)
        with pytest.raises(BrokenWorldException, match="20 bytes are too many") as caught:
            await guest.world("w").recv_view(check, 0, timeout_s=PATIENCE_S)
        assert (caught.value.cause, caught.value.rank) == (Cause.ERROR, 0)


async def test_peer_is_named_when_a_collective_starts_on_a_lost_connection() -> None:
    async with managers(2, shared_memory_bytes=0) as (host, guest):
        await form("w", host.listen(), host, guest)
        with data_sockets() as socks:
            for sock in socks:
                sock.shutdown(socket.SHUT_RDWR)
        await until(lambda: host.world("w")._operations._connections[1].end_reason is not None)
        with pytest.raises(BrokenWorldException) as caught:
            await host.communicator.all_reduce(torch.zeros(4), world_name="w")
        assert (caught.value.cause, caught.value.rank) == (Cause.TRANSPORT, 1)
