"""A member with a local failure (no memory, no thread, an operation that raises) reports it, and every operation ends."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from multiworld import BrokenWorldException, Cause, World, WorldManager
from multiworld.collectives import movement as collectives
from multiworld.collectives import reductions
from multiworld.elastic.agent import suspect_of
from multiworld.elastic.protocol.messages import MemberInfo, View
from multiworld.ops import p2p as messages
from multiworld.ops.operation import Collective, Plan
from tests.integration.members import PATIENCE_S, Spawn, form

PATIENT_S = 20.0
ERRORS = [MemoryError(), ValueError("refused"), TypeError("refused")]

MEMBER_SETTINGS = {"heartbeat_timeout_s": PATIENT_S}


@pytest.fixture
async def pair() -> AsyncIterator[tuple[World, World]]:
    async with (
        WorldManager(heartbeat_timeout_s=PATIENT_S) as host,
        WorldManager(heartbeat_timeout_s=PATIENT_S) as guest,
    ):
        await form("w", host.listen(), host, guest)
        yield host.world("w"), guest.world("w")


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        raise error

    return fail


def failing_algorithm(error: Exception) -> Callable[..., Any]:
    async def fail(*_: object) -> None:
        raise error

    return fail


def all_reduce(world: World) -> Collective:
    return reductions.all_reduce(world.ranks, torch.ones(4), ReduceOp.SUM)


def all_to_all(world: World) -> Collective:
    return collectives.all_to_all(world.ranks, [torch.zeros(2), torch.zeros(2)], [torch.ones(2), torch.ones(2)])


PLANS: dict[str, Callable[[World, Exception], tuple[Plan, Callable[[World], Plan]]]] = {
    "copying back a message": lambda world, error: (
        replace(messages.recv(world.ranks, torch.zeros(4), 1, 0), copy_back=raising(error)),
        lambda peer: messages.send(peer.ranks, torch.ones(4), 0, 0),
    ),
    "taking a message's memory": lambda world, error: (
        replace(messages.send(world.ranks, torch.zeros(4), 1, 0), buffer=raising(error)),
        lambda peer: messages.recv(peer.ranks, torch.ones(4), 0, 0),
    ),
    "taking a message from a device": lambda world, error: (
        replace(messages.send(world.ranks, torch.zeros(4), 1, 0), buffer=raising(error), staged=True),
        lambda peer: messages.recv(peer.ranks, torch.ones(4), 0, 0),
    ),
    "taking a collective from a device": lambda world, error: (
        replace(all_reduce(world), algorithm=raising(error), staged=True),
        all_reduce,
    ),
    "computing": lambda world, error: (
        replace(all_reduce(world), algorithm=lambda: failing_algorithm(error)),
        all_reduce,
    ),
    "copying back a collective": lambda world, error: (
        replace(all_to_all(world), copy_back=raising(error)),
        all_to_all,
    ),
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("what", PLANS)
async def test_world_breaks_with_the_failing_member_named_when_an_operation_raises(
    pair: tuple[World, World], what: str, error: Exception
) -> None:
    """Both ends name that member and not a peer, and no operation waits forever, including those queued behind it."""
    world, peer = pair
    plan, counterpart = PLANS[what](world, error)
    pending = [peer.start(counterpart(peer)), world.start(messages.recv(world.ranks, torch.zeros(1), 1, 9))]
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(BrokenWorldException) as caught:
            await world.start(plan)
        await asyncio.gather(*pending, return_exceptions=True)
        with pytest.raises(BrokenWorldException) as told:
            await peer.recv(torch.zeros(1), 0, tag=9)
    for failure in (caught.value, told.value):
        assert (failure.cause, failure.rank) == (Cause.LOCAL, 0)
        assert type(error).__name__ in failure.detail


async def test_world_breaks_with_the_failing_member_named_when_no_thread_starts(
    pair: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, peer = pair

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    sending = asyncio.create_task(peer.send(torch.ones(4), 0))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(BrokenWorldException) as caught:
            await world.recv(torch.zeros(4, 2)[:, 0], 1)
    await asyncio.gather(sending, return_exceptions=True)
    assert (caught.value.cause, caught.value.rank) == (Cause.LOCAL, 0)


async def test_callers_get_errors_when_no_thread_can_free_their_world(
    pair: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, _ = pair

    def refuse(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    coming = asyncio.create_task(world.recv(torch.zeros(4), 1))
    await asyncio.sleep(0)
    with monkeypatch.context() as patch:
        patch.setattr("multiworld.world._thread.start_new_thread", refuse)
        world._control_loop.call_soon(world.fail, Cause.ABORTED, 0, "for the test")
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(BrokenWorldException):
                await coming
        assert not world.reclaimed.is_set()
    assert await asyncio.to_thread(world.reclaimed.wait, PATIENCE_S)


def test_members_suspect_the_member_with_the_local_failure() -> None:
    view = View(1, tuple(MemberInfo(name, "127.0.0.1", 1) for name in ("a", "b")))
    assert suspect_of("a", view, BrokenWorldException("w", Cause.LOCAL, 1, "MemoryError")) == "b"


@pytest.mark.parametrize("left_kib", [256, 1024, 4096, 8192, 8448, 9216, 12288, 20480])
async def test_every_operation_ends_when_little_address_space_is_left(spawn: Spawn, left_kib: int) -> None:
    """Only that member counts as failed. glibc may end the process; then its peer sees the exit."""
    async with WorldManager(heartbeat_timeout_s=PATIENT_S) as manager:
        victim = await spawn()
        await form("w", manager.listen(), manager, victim)
        starved = victim.start("starve", world="w", peer=0, left_kib=left_kib)
        here, sent = manager.communicator, asyncio.create_task(manager.communicator.send(torch.ones(4), 1, "w", tag=1))
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(BrokenWorldException) as caught:
                await here.all_reduce(torch.empty(1 << 27), world_name="w")
            await asyncio.gather(sent, return_exceptions=True)
            ended: Any = (await asyncio.gather(starved, return_exceptions=True))[0]
    assert caught.value.rank == 1, caught.value
    if isinstance(ended, EOFError):
        assert "thread-local data: ABORT" in victim.complaints
        return
    assert caught.value.cause is Cause.LOCAL
    assert ended[0] == ["local", 1]
    assert ended[1] in (["local", 1], ["done", -1])  # a thread may have been available
