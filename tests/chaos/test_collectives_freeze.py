"""A member that is frozen in a collective, and continued after the others broke the world, ends the world as well.

`MULTIWORLD_TEST_FREEZES` is the number of freezes (8; a soak takes 1000), `MULTIWORLD_TEST_SEED` reproduces a run. A freeze takes
over three seconds, so the worlds are spread over several crews that are frozen concurrently.
"""

import asyncio
import os
import random
import signal

import pytest

from tests.integration.members import Member, Spawn, form

FREEZES = int(os.environ.get("MULTIWORLD_TEST_FREEZES", "8"))
SEED = int(os.environ.get("MULTIWORLD_TEST_SEED", "0"))
CREWS = 4
SIZE = 3
AT_ONCE = 3
"""Concurrent collectives."""
OPERATIONS = ("broadcast", "scatter", "all_gather", "gather", "reduce", "all_to_all", "reduce_scatter", "all_reduce")


pytestmark = pytest.mark.timeout(120 + 10 * FREEZES)

MEMBER_SETTINGS = {"verify_collectives": False, "heartbeat_timeout_s": 3.0}


@pytest.mark.parametrize(("operations", "count"), [(("broadcast",), 0), (OPERATIONS, 50_000)], ids=["empty", "large"])
async def test_member_ends_its_world_when_it_wakes_from_a_freeze_in_a_collective(
    spawn: Spawn, operations: tuple[str, ...], count: int
) -> None:
    chance = random.Random(SEED)
    everybody = [[await spawn() for _ in range(SIZE)] for _ in range(CREWS)]

    async def crew(number: int, crew_members: list[Member]) -> None:
        port = await crew_members[0].do("listen")
        for freeze in range(number, FREEZES, CREWS):
            operation = operations[freeze % len(operations)]
            await form(f"w{freeze}", port, *crew_members)
            await _freeze_and_continue(f"w{freeze}", crew_members, operation, count, chance)

    async with asyncio.TaskGroup() as crews:
        for number, crew_members in enumerate(everybody):
            crews.create_task(crew(number, crew_members))


async def _freeze_and_continue(
    world: str, everybody: list[Member], operation: str, count: int, chance: random.Random
) -> None:
    root = everybody[0]
    work = {"world": world, "operation": operation, "root": 0, "count": count, "at_once": AT_ONCE}
    operating = [member.start("repeat", **work) for member in everybody]
    await asyncio.sleep(chance.uniform(0.0, 0.1))  # the moment of the freeze is what varies
    root.signal(signal.SIGSTOP)
    for member in everybody[1:]:
        await member.do("told", kind="broken", world=world)
    root.signal(signal.SIGCONT)
    for rank, task in enumerate(operating):
        async with asyncio.timeout(30):
            assert await task > 0, (world, rank)
    for rank, member in enumerate(everybody):
        assert await member.do("reclaimed", world=world), (world, rank)
        await member.do("remove", world=world)
