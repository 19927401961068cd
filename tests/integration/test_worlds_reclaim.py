"""Ended worlds leave nothing behind, however often and however they ended; and a program may exit in any state."""

import asyncio
import contextlib
import gc
import os
import signal
import threading
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from multiworld import BrokenWorldException, Cause, WorldManager
from multiworld.ops import p2p
from multiworld.transport.segments import SegmentPool
from tests.integration.members import PATIENCE_S, Spawn, form, managers, resources
from tests.waiting import until

CYCLES = int(os.environ.get("MULTIWORLD_TEST_CYCLES", "60"))
"""Number of worlds to create and end; enough to see a leak of one thread or descriptor per cycle. 1000 takes some minutes."""
GROWTH_KIB = 16_384
"""Memory fluctuation that is not a leak; leaking `CYCLES` worlds with their groups, threads and stacks would exceed it."""

LARGE = 1_000_000
"""Elements of a float32 tensor that is sent through shared memory, in several pieces if it is copied."""

MEMBER_SETTINGS = {"heartbeat_timeout_s": 30.0}
"""Long, because no test here is about heartbeats and the machine may be busy."""


async def assert_flat(before: dict[str, int], pool: SegmentPool | None = None) -> None:
    """Check that usage is as before. A finished thread may need a moment to disappear."""

    def grown() -> bool:
        return any(after[each] > before[each] for each in ("threads", "fds", "mappings"))

    after = held(pool)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while grown():
                await asyncio.sleep(0.05)
                after = held(pool)
    assert not grown(), (before, after)
    assert after["memory_kib"] < before["memory_kib"] + GROWTH_KIB, (before, after)


async def assert_leaks_nothing(cycle: Callable[[], Awaitable[None]]) -> None:
    """Run the cycle a few times as warm-up, then `CYCLES` times."""
    for _ in range(10):
        await cycle()
    before = held()
    for _ in range(CYCLES):
        await cycle()
    await assert_flat(before)


async def reclaimed(*managers: WorldManager) -> None:
    """Return once all ended worlds of these managers are reclaimed."""
    for manager in managers:
        for world in manager.worlds.values():
            assert await asyncio.to_thread(world.reclaimed.wait, PATIENCE_S)


def held(pool: SegmentPool | None = None) -> dict[str, int]:
    """The resources that this process uses now, without the segments that it keeps for the next tensors."""
    kept = 0 if pool is None else len(pool._segments)
    usage = resources()
    return {
        **usage,
        "fds": usage["fds"] - 2 * kept,
        "mappings": Path("/proc/self/maps").read_text().count("/memfd:multiworld") - kept,
    }


async def test_repeatedly_killed_peers_leak_nothing(spawn: Spawn, manager: WorldManager) -> None:
    """On the host, with pending operations, also of tensors in shared memory; the name is reused at once."""
    port = manager.listen()
    peers = [await spawn() for _ in range(5 + CYCLES // 2)]
    before: dict[str, int] = {}
    copied = torch.zeros(LARGE)
    pool = manager._segments
    assert pool is not None
    for number, peer in enumerate(peers):
        assert await form("w", port, manager, peer) == number + 1
        receiving = asyncio.create_task(manager.communicator.recv(torch.zeros(1000), 1, "w"))
        for tag, tensor in enumerate((copied, manager.allocate((LARGE,), torch.float32)), 1):
            peer.start("recv", world="w", src=0, count=LARGE, tag=tag)
            manager.communicator.isend(tensor, 1, "w", tag=tag)
        await asyncio.sleep(0.001 * (number % 10))  # the messages are cut at different points
        peer.kill()
        with pytest.raises(BrokenWorldException):
            await receiving
        await peer.dispose()
        await reclaimed(manager)
        if number == 4:
            before = held(pool)
    del tensor
    await assert_flat(before, pool)
    assert not any(segment.users for segment in pool._segments.values())
    assert pool.reserved_bytes <= 4 * 4 * LARGE  # at most four tensors are kept for the next ones


async def test_repeatedly_failed_joins_leak_nothing() -> None:
    async with WorldManager(secret="right") as host, WorldManager(secret="wrong") as guest:
        port = host.listen()

        async def cycle() -> None:
            hosting = asyncio.create_task(host.initialize_world("w", 0, 2, port=port))
            with pytest.raises(Exception, match="wrong secret"):
                await guest.initialize_world("w", 1, 2, port=port)
            hosting.cancel()
            await asyncio.gather(hosting, return_exceptions=True)
            await reclaimed(guest)

        await assert_leaks_nothing(cycle)


# -- the end of a program ----------------------------------------------------------------------------------------------------

STATES = ["unused", "listening", "ready", "pending", "host_waits", "guest_waits", "broken", "closed", "frozen_peer"]


@pytest.mark.parametrize("state", STATES)
async def test_program_exits_cleanly_with_an_open_world(spawn: Spawn, state: str) -> None:
    """Without explicit clean-up: exit status 0, nothing on stderr. From Python 3.12 on, no thread can be started at this point."""
    member, peer = await spawn(), await spawn()
    if state == "listening":
        await member.do("listen")
    elif state == "host_waits":
        member.start("join", world="w", rank=0, size=2, port=await member.do("listen"))
    elif state == "guest_waits":
        member.start("join", world="w", rank=1, size=2, port=await peer.do("listen"))
    elif state != "unused":
        await form("w", await member.do("listen"), member, peer)
    if state == "pending":
        member.start("recv", world="w", src=1)
        member.start("send", world="w", dst=1, count=3_000_000)
    elif state == "broken":
        peer.kill()
        await member.do("event", kind="broken", world="w")
    elif state == "closed":
        await member.do("close", world="w")
    elif state == "frozen_peer":
        member.start("recv", world="w", src=1)
        peer.signal(signal.SIGSTOP)
        await peer.stopped()
    await member.do("threads")
    await member.do("no_new_threads")
    assert await member.end() == 0
    if state == "ready":
        assert (await peer.do("event", kind="broken", world="w"))[3:] == [Cause.LEFT, 0]
    assert not [line for line in member.complaints.splitlines() if "ready->broken" not in line]


@pytest.mark.parametrize("connected", [False, True])
async def test_program_exits_cleanly_while_a_world_forms(spawn: Spawn, connected: bool) -> None:
    """A thread waits for the connection of the other member at this point."""
    member, victim = await spawn(), await spawn()
    await victim.do("freeze_while_connecting", connected=connected)
    port = await member.do("listen")
    member.start("join", world="w", rank=0, size=2, port=port)
    victim.start("join", world="w", rank=1, size=2, port=port)
    await victim.stopped()
    assert await member.end() == 0


async def test_forked_child_exits_cleanly_and_does_not_affect_its_parents_worlds(spawn: Spawn) -> None:
    member, peer = await spawn(), await spawn()
    await form("w", await member.do("listen"), member, peer)
    assert await member.do("fork_a_child_that_ends") == 0
    coming = peer.start("recv", world="w", src=0)
    await member.do("send", world="w", dst=1, value=5.0)
    assert await coming == [5.0]


async def test_killed_member_is_detected_as_exit_when_its_forked_child_lives_on(spawn: Spawn) -> None:
    """Not as a hang: the child has closed its copies of the connections."""
    member, peer = await spawn(), await spawn()
    await form("w", await peer.do("listen"), peer, member)
    child = await member.do("fork_a_child_that_stays")
    try:
        coming = peer.start("recv", world="w", src=1)
        member.kill()
        with pytest.raises(BrokenWorldException) as caught:
            await coming
        assert (caught.value.cause, caught.value.rank) == (Cause.EXIT, 1)
    finally:
        os.kill(child, signal.SIGKILL)


async def test_ended_worlds_with_unlimited_names_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiworld.manager._MAX_ENDED", 3)
    async with WorldManager() as manager:
        port = manager.listen()
        for number in range(6):
            world = await manager.initialize_world(f"w{number}", 0, 1, port=port)
            world.fail(Cause.ABORTED, 0, "for the test")
        await manager.initialize_world("lives", 0, 1, port=port)
        assert sorted(manager.worlds) == ["lives", "w3", "w4", "w5"]
        assert manager.is_broken("w0")


async def test_connection_is_freed_when_its_ended_world_is_kept_by_name() -> None:
    async with managers(2) as (host, guest):
        await form("w", host.listen(), host, guest)
        world = host.world("w")
        connection = weakref.ref(world._operations._connections[1])
        guest.world("w").fail(Cause.ABORTED, 1, "for the test")
        assert await asyncio.to_thread(world.reclaimed.wait, PATIENCE_S)

        def is_freed() -> bool:
            gc.collect()
            return connection() is None

        await until(is_freed)
        assert host.world("w") is world


async def test_callers_get_errors_and_the_lost_thread_is_reported_when_a_thread_never_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The abort of NCCL may hang, or a copy from a device."""
    freed, copying = threading.Event(), threading.Event()

    def copy_back() -> None:
        copying.set()
        freed.wait(PATIENCE_S)

    monkeypatch.setattr("multiworld.world._JOIN_S", 0.05)
    async with managers(2) as (host, guest):
        await form("w", host.listen(), host, guest)
        world = host.world("w")
        receiving = world.start(replace(p2p.recv(world.facts, torch.zeros(4), 1, 0), copy_back=copy_back))
        other = asyncio.create_task(host.communicator.recv(torch.zeros(4), 1, "w", tag=1))
        await guest.communicator.send(torch.ones(4), 0, "w")
        assert await asyncio.to_thread(copying.wait, PATIENCE_S)
        guest.world("w").fail(Cause.ABORTED, 1, "for the test")
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(BrokenWorldException):
                await other
        assert not freed.is_set()
        assert await asyncio.to_thread(world.reclaimed.wait, PATIENCE_S)
        assert "threads are still blocked" in caplog.text
        freed.set()
        with pytest.raises(BrokenWorldException):
            await receiving
