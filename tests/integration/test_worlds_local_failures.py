"""A member with a local failure (no memory, no thread, an operation that raises) reports it, and every operation ends."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from multiworld import BrokenWorldException, Cause, World
from multiworld.collectives import movement as collectives
from multiworld.collectives import reductions
from multiworld.ops import p2p as messages
from multiworld.ops.operation import Collective, Operation, Send
from tests.integration.members import PATIENCE_S, form, managers

ERRORS = [MemoryError(), ValueError("refused")]


@pytest.fixture
async def pair() -> AsyncIterator[tuple[World, World]]:
    async with managers(2) as (host, guest):
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


def staged(operation: Send, copy: Callable[..., Any]) -> Send:
    """Let `copy` take the data of the operation from a device."""
    on_device: Any = SimpleNamespace(nbytes=16, is_cuda=False, detach=copy)
    return replace(operation, tensors=(on_device,), staged=True, data=None)


def all_reduce(world: World) -> Collective:
    return reductions.all_reduce(world.facts, torch.ones(4), ReduceOp.SUM)


def all_to_all(world: World) -> Collective:
    return collectives.all_to_all(world.facts, [torch.zeros(2), torch.zeros(2)], [torch.ones(2), torch.ones(2)])


OPERATIONS: dict[str, Callable[[World, Exception], tuple[Operation, Callable[[World], Operation]]]] = {
    "copying back a message": lambda world, error: (
        replace(messages.recv(world.facts, torch.zeros(4), 1, 0), copy_back=raising(error)),
        lambda peer: messages.send(peer.facts, torch.ones(4), 0, 0),
    ),
    "taking a message from a device": lambda world, error: (
        staged(messages.send(world.facts, torch.zeros(4), 1, 0), raising(error)),
        lambda peer: messages.recv(peer.facts, torch.ones(4), 0, 0),
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
@pytest.mark.parametrize("what", OPERATIONS)
async def test_world_breaks_with_the_failing_member_named_when_an_operation_raises(
    pair: tuple[World, World], what: str, error: Exception
) -> None:
    """Both ends name that member and not a peer, and no operation waits forever, including those queued behind it."""
    world, peer = pair
    operation, counterpart = OPERATIONS[what](world, error)
    pending = [peer.start(counterpart(peer)), world.start(messages.recv(world.facts, torch.zeros(1), 1, 9))]
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(BrokenWorldException) as caught:
            await world.start(operation)
        await asyncio.gather(*pending, return_exceptions=True)
        with pytest.raises(BrokenWorldException) as told:
            await peer.start(messages.recv(peer.facts, torch.zeros(1), 0, 9))
    for failure in (caught.value, told.value):
        assert (failure.cause, failure.rank) == (Cause.LOCAL, 0)
        assert type(error).__name__ in failure.detail
