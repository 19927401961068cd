"""Members are killed, frozen and partitioned: their worlds break for all members with cause and rank; no other world is affected."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

import pytest
import torch

from multiworld import BrokenWorldException, Cause, WorldEvent, WorldManager, WorldState
from tests.integration.members import PATIENCE_S, Member, Spawn, form
from tests.integration.proxy import DATA, HOST, LIFELINE, Proxy, proxy_to

UNSENDABLE = 3_000_000  # float32: 12 MB cannot be sent before the receiver receives

PULSE_S = 6.0
"""Heartbeat timeout: longer than the delays of a busy machine, and short enough for a test to wait for it."""
STALL_S = 4.0
MEMBER_SETTINGS = {"heartbeat_timeout_s": PULSE_S}


@contextlib.asynccontextmanager
async def undisturbed(manager: WorldManager, port: int, neighbour: Member) -> AsyncIterator[None]:
    """A world beside the failing one: values go back and forth during the block and for a while after it."""
    await form("undisturbed", port, manager, neighbour)
    neighbour.start("echo", world="undisturbed", peer=0)
    rounds, done = 0, False

    async def ping() -> None:
        nonlocal rounds
        while not done or rounds < target:
            tensor = torch.full((4,), float(rounds))
            await manager.communicator.send(tensor, 1, "undisturbed")
            await manager.communicator.recv(tensor, 1, "undisturbed")
            assert tensor.tolist() == [rounds + 1.0] * 4
            rounds += 1

    target = 0
    pinging = asyncio.create_task(ping())
    try:
        yield
    finally:
        target, done = rounds + 50, True
        async with asyncio.timeout(PATIENCE_S):
            await pinging
    assert manager.worlds["undisturbed"].state is WorldState.READY


async def broken(stream: AsyncIterator[WorldEvent], world: str) -> tuple[Cause | None, int | None]:
    async with asyncio.timeout(PATIENCE_S):
        async for event in stream:
            if (event.kind, event.world_name) == ("broken", world):
                return event.cause, event.rank
    raise AssertionError("the events ended")


FAULTS = [pytest.param(signal.SIGKILL, Cause.EXIT, id="killed"), pytest.param(signal.SIGSTOP, Cause.HANG, id="frozen")]


async def form_with(victim: Member, victim_rank: int, manager: WorldManager) -> None:
    if victim_rank == 0:
        await form("w", await victim.do("listen"), victim, manager)
    else:
        await form("w", manager.listen(), manager, victim)


@pytest.mark.parametrize(("signum", "cause"), FAULTS)
@pytest.mark.parametrize("victim_rank", [0, 1])
@pytest.mark.parametrize("manager", [0, None], ids=["tcp", "shared memory"], indirect=True)
async def test_survivor_gets_cause_and_rank_when_its_peer_is(
    spawn: Spawn, manager: WorldManager, victim_rank: int, signum: signal.Signals, cause: Cause
) -> None:
    victim, neighbour = await spawn(), await spawn()
    async with undisturbed(manager, manager.listen(), neighbour):
        await form_with(victim, victim_rank, manager)
        events = manager.events()
        talk = manager.communicator
        pending = [talk.recv(torch.zeros(4), victim_rank, "w", tag=tag) for tag in range(9)]
        pending += [talk.send(torch.zeros(UNSENDABLE), victim_rank, "w", tag=100)]
        tasks = [asyncio.create_task(operation) for operation in pending]
        await asyncio.sleep(0)
        victim.signal(signum)
        assert await broken(events, "w") == (cause, victim_rank)
        for task in tasks:
            with pytest.raises(BrokenWorldException) as raised:
                await task
            assert (raised.value.cause, raised.value.rank) == (cause, victim_rank)
        with pytest.raises(BrokenWorldException):
            await talk.send(torch.zeros(4), victim_rank, "w")
        assert talk.is_broken("w")


@pytest.mark.parametrize(("signum", "cause"), FAULTS)
@pytest.mark.parametrize("victim_rank", [0, 1, 2])
async def test_all_survivors_of_a_world_of_three_learn_which_member_failed(
    spawn: Spawn, victim_rank: int, signum: signal.Signals, cause: Cause
) -> None:
    everybody = [await spawn() for _ in range(3)]
    port = await everybody[0].do("listen")
    await form("w", port, *everybody)
    survivors = [rank for rank in range(3) if rank != victim_rank]
    # The survivors wait for each other: nothing on their own connection shows that the world is broken.
    pending = [everybody[rank].start("recv", world="w", src=other) for rank, other in (survivors, reversed(survivors))]
    everybody[victim_rank].signal(signum)
    for task in pending:
        with pytest.raises(BrokenWorldException) as raised:
            await task
        assert (raised.value.cause, raised.value.rank) == (cause, victim_rank)
    for rank in survivors:
        told = await everybody[rank].do("event", kind="broken", world="w")
        assert told[3:] == [cause, victim_rank]


@pytest.mark.parametrize("victim_rank", [0, 1])
async def test_survivor_sees_a_stall_when_its_peers_event_loop_is_blocked(spawn: Spawn, victim_rank: int) -> None:
    async with WorldManager(heartbeat_timeout_s=PULSE_S, loop_stall_timeout_s=STALL_S) as manager:
        victim = await spawn(loop_stall_timeout_s=STALL_S)
        await form_with(victim, victim_rank, manager)
        events = manager.events()
        receiving = asyncio.create_task(manager.communicator.recv(torch.zeros(4), victim_rank, "w"))
        victim.start("block", seconds=3600)
        assert await broken(events, "w") == (Cause.STALLED, victim_rank)
        with pytest.raises(BrokenWorldException, match="its event loop has not run for"):
            await receiving


@pytest.mark.parametrize("watched", [False, True], ids=["unwatched", "one side watches"])
async def test_world_survives_when_the_blocked_event_loop_is_not_registered(spawn: Spawn, watched: bool) -> None:
    async with WorldManager(heartbeat_timeout_s=PULSE_S, loop_stall_timeout_s=1.0 if watched else None) as manager:
        victim = await spawn()
        await form("w", manager.listen(), manager, victim)
        await victim.do("block", seconds=1.25 * PULSE_S)
        assert manager.worlds["w"].state is WorldState.READY


@pytest.mark.parametrize("data_too", [True, False], ids=["network", "control connection"])
async def test_both_sides_see_a_broken_world_when_they_are_cut_off(
    spawn: Spawn, manager: WorldManager, data_too: bool
) -> None:
    victim, neighbour = await spawn(), await spawn()
    port = manager.listen(HOST)
    async with undisturbed(manager, manager.listen(), neighbour), proxy_to(port) as proxy:
        await form_over(proxy, manager, victim, port)
        there = victim.start("recv", world="w", src=0)
        here = asyncio.create_task(manager.communicator.recv(torch.zeros(4), 1, "w"))
        proxy.freeze(LIFELINE)
        if data_too:
            proxy.freeze(DATA)
        with pytest.raises(BrokenWorldException) as raised:
            await here
        assert (raised.value.cause, raised.value.rank) == (Cause.HANG, 1)
        with pytest.raises(BrokenWorldException) as raised:
            await there
        assert not data_too or (raised.value.cause, raised.value.rank) == (Cause.HANG, 0)


async def test_only_the_operation_timeout_detects_a_cut_data_connection(spawn: Spawn) -> None:
    """The control connection works, so no member is unresponsive; a timeout of the operation covers this case."""
    victim = await spawn()
    # Without shared memory, because only a TCP connection can be cut.
    async with WorldManager(heartbeat_timeout_s=PULSE_S, shared_memory_bytes=0) as manager:
        port = manager.listen(HOST)
        async with proxy_to(port) as proxy:
            await form_over(proxy, manager, victim, port)
            proxy.freeze(DATA)
            there = victim.start("recv", world="w", src=0)
            victim.start("send", world="w", dst=0)
            with pytest.raises(BrokenWorldException) as raised:
                await manager.communicator.recv(torch.zeros(4), 1, "w", timeout_s=1.25 * PULSE_S)
            assert raised.value.cause is Cause.TIMEOUT
            with pytest.raises(BrokenWorldException) as raised:
                await there
            assert raised.value.cause is Cause.TIMEOUT


async def form_over(proxy: Proxy, manager: WorldManager, victim: Member, port: int) -> None:
    joining = victim.start("join", world="w", rank=1, size=2, port=proxy.port, addr=HOST)
    await manager.initialize_world("w", 0, 2, addr=HOST, port=port)
    await joining


async def test_only_process_exit_breaks_a_world_without_heartbeats(spawn: Spawn) -> None:
    peer = await spawn(enable_monitor=False)
    async with WorldManager(enable_monitor=False) as manager:
        await form("w", manager.listen(), manager, peer)
        events = manager.events()
        peer.signal(signal.SIGSTOP)
        await asyncio.sleep(1.5)
        peer.signal(signal.SIGCONT)
        coming = peer.start("recv", world="w", src=0)
        await manager.communicator.send(torch.ones(4), 1, "w")
        assert await coming == [1.0]
        peer.kill()
        assert await broken(events, "w") == (Cause.EXIT, 1)
