"""A member fails before, during or after an operation, as root or not: its world breaks everywhere; no other world is affected.

Runs a sample of the matrix by default; `pytest tests/chaos --full` runs all of it.
"""

import asyncio
import itertools
import random
import signal
from dataclasses import dataclass
from typing import Any

import pytest

from multiworld import BrokenWorldException, Cause, WorldManager
from tests.integration.members import Member, Spawn, form
from tests.integration.parts import OPERATIONS, Part, expected

BIG = 1_000_000
"""float32 elements: an operation of this size takes a while."""
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Fault:
    """A failure case. `victim` is 0, which hosts the world, or the last rank."""

    operation: str
    size: int
    victim: int
    is_root: bool
    moment: str
    how: str
    checked: bool

    @property
    def root(self) -> int:
        return self.victim if self.is_root else (self.victim + 1) % self.size

    def __str__(self) -> str:
        role = "root" if self.is_root else "other"
        mode = "checked" if self.checked else "plain"
        return f"{self.operation}-{self.size}-rank{self.victim}-{role}-{self.moment}-{self.how}-{mode}"


def _matrix() -> list[Fault]:
    return [
        Fault(operation, size, victim, is_root, moment, how, checked)
        for operation, size, is_root, moment, how, checked in itertools.product(
            OPERATIONS,
            (2, 3, 4),
            (True, False),
            ("before", "during", "midway", "after"),
            ("kill", "stop"),
            (True, False),
        )
        for victim in (0, size - 1)
    ]


def _sample() -> list[Fault]:
    """Every operation with the victim as root and not, killed at each moment; a few frozen."""
    chance = random.Random(3)
    faults = _matrix()
    picked = [
        chance.choice(
            [
                fault
                for fault in faults
                if (fault.operation, fault.is_root, fault.how) == (operation, is_root, "kill")
                and (fault.moment in ("during", "midway")) == within
            ]
        )
        for operation, is_root, within in itertools.product(OPERATIONS, (True, False), (True, False))
    ]
    frozen = [fault for fault in faults if fault.how == "stop" and fault.moment == "during"]
    return picked + chance.sample(frozen, 4)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    faults = _matrix() if metafunc.config.getoption("--full", default=False) else _sample()
    metafunc.parametrize("fault", faults, ids=str)


async def test_world_breaks_at_all_survivors_and_their_other_world_continues(spawn: Spawn, fault: Fault) -> None:
    # A busy machine must not make a healthy member look frozen.
    settings: dict[str, Any] = {
        "verify_collectives": fault.checked,
        "heartbeat_timeout_s": 30.0 if fault.how == "kill" else 3.0,
    }
    async with WorldManager(**settings) as manager:
        everybody = [await spawn(**settings) for _ in range(fault.size)]
        survivors = {rank: member for rank, member in enumerate(everybody) if rank != fault.victim}
        await form("hurt", await everybody[0].do("listen"), *everybody)
        await form("well", manager.listen(), manager, *survivors.values())
        pending = [member.start("operate", world="well", operation="all_reduce") for member in survivors.values()]

        await _fail(fault, everybody)
        for rank, member in survivors.items():
            with pytest.raises(BrokenWorldException) as caught:  # every later operation
                await member.do("operate", world="hurt", operation="barrier")
            assert (caught.value.cause, caught.value.rank) == (_cause(fault), fault.victim), rank
            assert await member.do("state", world="hurt") == "broken"

        assert not any(each.done() for each in pending), "the fault affected the other world"
        async with asyncio.timeout(PATIENCE_S):
            total = await Part(manager, "well", 0, 4).perform("all_reduce")
            assert [total] * len(pending) == await asyncio.gather(*pending)
        assert total == expected("all_reduce", fault.size, 0, 0)


def _cause(fault: Fault) -> Cause:
    return Cause.EXIT if fault.how == "kill" else Cause.HANG


async def _fail(fault: Fault, everybody: list[Member]) -> None:
    """Inject the fault and check that no survivor gets a wrong result or another error."""
    victim = everybody[fault.victim]
    survivors = [rank for rank in range(fault.size) if rank != fault.victim]
    part: dict[str, Any] = {"world": "hurt", "operation": fault.operation, "root": fault.root}
    part["count"] = BIG if fault.moment == "midway" else 4

    def strike() -> None:
        victim.signal(signal.SIGKILL if fault.how == "kill" else signal.SIGSTOP)

    if fault.moment == "before":
        strike()
        started = {rank: everybody[rank].start("operate", **part) for rank in survivors}
    elif fault.moment == "after":
        for rank, result in enumerate(await asyncio.gather(*(each.start("operate", **part) for each in everybody))):
            assert result == expected(fault.operation, fault.size, rank, fault.root)
        strike()
        started = {}
    else:
        started = {rank: everybody[rank].start("operate", **part) for rank in survivors}
        if fault.moment == "midway":
            victim.start("operate", **part)
            await asyncio.sleep(random.Random(str(fault)).uniform(0, 0.02))
        else:
            await asyncio.gather(*(everybody[rank].do("told", kind="joined", world="hurt") for rank in survivors))
        strike()
    async with asyncio.timeout(PATIENCE_S):
        outcomes = await asyncio.gather(*started.values(), return_exceptions=True)
    for rank, outcome in zip(started, outcomes, strict=True):
        if isinstance(outcome, BrokenWorldException):
            assert (outcome.cause, outcome.rank) == (_cause(fault), fault.victim), (rank, outcome)
        else:  # a member that has done its part may complete; with verification no member does without the others
            assert outcome == expected(fault.operation, fault.size, rank, fault.root), (rank, outcome)
            assert fault.moment == "midway" or not fault.checked or fault.operation == "send_and_recv"
