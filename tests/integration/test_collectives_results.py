"""Every operation gives the locally computed result for any size, dtype, shape, layout, root and reduction."""

from dataclasses import replace

import pytest
import torch

from multiworld import World, WorldManager
from multiworld.collectives import allreduce, transfers
from tests.integration.crew import MAX_SIZE, Crew
from tests.torture import data
from tests.torture.data import random_of
from tests.torture.operations import CollectivePart
from tests.torture.schedule import COLLECTIVES, REDUCING, Collective, collective_of

CASES = 30
"""Of each kind of operation and algorithm."""
SMALL = 1500
"""Elements of tensors whose pieces are small."""


@pytest.fixture(params=[False, True], ids=["", "small pieces"])
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether short tensors use the algorithms for long tensors."""
    if request.param:
        monkeypatch.setattr(allreduce, "ONE_SHOT_BYTES", 8)
        monkeypatch.setattr(allreduce, "CHUNK_BYTES", 64)
        monkeypatch.setattr(allreduce, "SLICE_ELEMENTS", 5)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # only then tensors are split into slices
        monkeypatch.setattr(transfers, "_CHUNK_BYTES", 100)
    return bool(request.param)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collective_gives_the_result_that_one_process_computes(crew: Crew, kind: str, small_pieces: bool) -> None:
    for number in range(CASES):
        rng = random_of(f"{kind}/{small_pieces}/{number}")
        size = rng.randint(1, MAX_SIZE)
        planned = collective_of(rng, kind, size, f"{kind}/{number}")
        if planned.op in ("AVG", "PRODUCT"):  # exact for at most four members
            size = (size + 1) // 2
            planned = replace(planned, root=planned.root % size)
        if small_pieces:
            planned = replace(planned, count=planned.count % SMALL)

        async def part(manager: WorldManager, world: World, size: int = size, planned=planned) -> None:  # type: ignore[no-untyped-def]
            own = CollectivePart(manager.communicator, world.name, world.rank, size, planned)
            await own.start()
            own.check()

        crew.run(size, part, verified=rng.random() < 0.5)


@pytest.mark.parametrize("layout", data.LAYOUTS)
def test_every_collective_takes_every_layout_and_dtype(
    crew: Crew, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One world, and one call for each kind, reduction and dtype. Memory around the tensors must not change."""
    monkeypatch.setattr(data, "layouts", (layout,))
    kinds = [(kind, op) for kind in COLLECTIVES for op in (data.REDUCED if kind in REDUCING else ("",))]
    counts = (24, 1, 0) if layout == "flat" else (1,) if layout == "0-d" else (24,)
    calls = [
        Collective(f"{layout}/{kind}/{op}/{dtype}/{count}", kind, dtype, count, 0, op)
        for kind, op in kinds
        for dtype in (data.REDUCED[op] if op else data.MOVED)
        for count in counts
    ]

    async def part(manager: WorldManager, world: World) -> int:
        for call in calls:
            own = CollectivePart(manager.communicator, world.name, world.rank, 2, call)
            await own.start()
            own.check()
        return len(calls)

    assert crew.run(2, part) == [len(calls)] * 2


@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize("size", range(1, MAX_SIZE + 1))
def test_barrier_waits_for_all_ranks(crew: Crew, size: int, verified: bool) -> None:
    came: list[int] = []

    async def part(manager: WorldManager, world: World) -> int:
        came.append(world.rank)
        await manager.communicator.barrier(world.name)
        return len(came)

    assert crew.run(size, part, verified=verified) == [size] * size


def test_results_are_correct_when_inputs_and_outputs_share_memory(crew: Crew) -> None:
    async def part(manager: WorldManager, world: World) -> list[list[float]]:
        here, name, rank = manager.communicator, world.name, world.rank
        places = [torch.full((5,), 10.0 * rank + place) for place in range(3)]
        await here.all_to_all(places, places, name)
        gathered = [torch.full((5,), float(rank)) for _ in range(3)]
        await here.all_gather(gathered, gathered[(rank + 1) % 3], name)
        scattered = [torch.full((5,), 10.0 * rank + place) for place in range(3)]
        await here.reduce_scatter(scattered[(rank + 1) % 3], scattered, world_name=name)
        return [[each[4].item() for each in tensors] for tensors in (places, gathered, [scattered[(rank + 1) % 3]])]

    for rank, results in enumerate(crew.run(3, part)):
        assert results == [[rank, 10.0 + rank, 20.0 + rank], [0.0, 1.0, 2.0], [30.0 + 3 * rank]]
