"""Members of elastic worlds are killed, frozen and cut off during all-reduces; the others finish with identical bits."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from multiworld.collectives.quantization import Quantization
from multiworld.elastic import ElasticRendezvous, EvictedError, RendezvousError, ViewChangeError
from tests.integration.elastic_part import random_operands
from tests.integration.members import PATIENCE_S, Member, Spawn
from tests.integration.proxy import HOST, proxy_to
from tests.programs import free_port
from tests.waiting import until

PULSE_S = 6.0
"""Heartbeat timeout where a member is frozen or cut off: longer than the delays of a busy machine."""
COUNTS = [300_000, 5, 300_000, 1000, 300_000, 300_000, 20, 300_000]
"""Some are sent whole to each member, and some in shares."""
WEIGHTS = (1.0, 10.0, 100.0, 1000.0)


@contextlib.asynccontextmanager
async def rendezvous(pulse_s: float = PATIENCE_S, **settings: Any) -> AsyncIterator[ElasticRendezvous]:
    async with ElasticRendezvous(heartbeat_timeout_s=pulse_s, **settings) as made:
        yield made


async def joined(spawn: Spawn, count: int, port: int, pulse_s: float = PATIENCE_S, **settings: Any) -> list[Member]:
    """Members of one world, by rank."""
    made = [await spawn() for _ in range(count)]
    for member in made:
        await member.do("elastic_configure", heartbeat_timeout_s=pulse_s)
    places = await asyncio.gather(*(member.do("elastic_join", world="w", port=port, **settings) for member in made))
    return [member for _, member in sorted(zip(places, made, strict=True), key=lambda each: int(each[0]["rank"]))]


def reduce_all(everybody: list[Member], counts: list[int] = COUNTS, **settings: Any) -> "list[asyncio.Task[Any]]":
    return [
        member.start("elastic_reduce", world="w", weight=weight, counts=counts, **settings)
        for member, weight in zip(everybody, WEIGHTS, strict=False)
    ]


def values(weights: list[float], contributors: list[int], lost: float = 0.0) -> list[float]:
    """The expected tensors: sums that include the lost member's values if it contributed."""
    total = sum(weights)
    return [(total + (lost if size > len(weights) else 0)) * (index + 1) for index, size in enumerate(contributors)]


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("messages", [1, 20])
async def test_survivors_finish_with_identical_bits_when_one_of_four_is_killed(
    spawn: Spawn, victim: int, messages: int
) -> None:
    async with rendezvous(initial_members=4) as holder:
        everybody = await joined(spawn, 4, holder.port)
        await everybody[victim].do("elastic_fault", signum=signal.SIGKILL, messages=messages)
        tasks = reduce_all(everybody)
        assert await everybody[victim].ended() == -signal.SIGKILL
        del tasks[victim]
        outcomes = await asyncio.gather(*tasks)
        left = [weight for rank, weight in enumerate(WEIGHTS) if rank != victim]
        for outcome in outcomes:
            assert (outcome["success"], outcome["size"]) == (True, 3)
            assert outcome["bits"] == outcomes[0]["bits"]
            assert outcome["contributors"] == outcomes[0]["contributors"]
            assert outcome["values"] == values(left, outcome["contributors"], WEIGHTS[victim])
            assert outcome["retries"] <= 1, "0 if the view ended before this member had begun"
        assert holder.view("w").number == 2


@pytest.mark.parametrize("quantization", get_args(Quantization))
async def test_quantized_results_have_identical_bits_when_a_member_dies_and_another_joins(
    spawn: Spawn, quantization: Quantization
) -> None:
    async with rendezvous(initial_members=3) as holder:
        everybody = await joined(spawn, 3, holder.port)

        async def reduce(killed: Member | None = None) -> dict[str, Any]:
            tasks = reduce_all(everybody, quantization=quantization)
            if killed is not None:
                del tasks[everybody.index(killed)]
                assert await killed.ended() == -signal.SIGKILL
            outcomes = await asyncio.gather(*tasks)
            assert all(outcome["bits"] == outcomes[0]["bits"] for outcome in outcomes)
            return dict(outcomes[0])

        def check(outcome: dict[str, Any], weights: tuple[float, ...]) -> None:
            operands = [random_operands(weight, COUNTS) for weight in weights]
            for some, *of_members in zip(outcome["some"], *operands, strict=True):
                exact = torch.stack(of_members).sum(dim=0)[::997]
                spans = [max(each.max().item(), 0) - min(each.min().item(), 0) for each in of_members]
                limit = torch.tensor(sum(spans) / 254 + 1e-5)
                if quantization == "bfloat16":
                    limit = torch.stack(of_members).abs().sum(dim=0)[::997] / 127
                assert (torch.tensor(some) - exact).abs().le(limit).all()

        outcome = await reduce()
        check(outcome, WEIGHTS[:3])
        plain = sum(COUNTS) * 4 * 4 / 3  # without quantization
        assert outcome["sent"] < plain * (0.51 if quantization == "bfloat16" else 0.26)

        await everybody[1].do("elastic_fault", signum=signal.SIGKILL, messages=5)
        outcome = await reduce(killed=everybody[1])
        assert (outcome["success"], outcome["size"]) == (True, 2)

        everybody[1] = await spawn()
        await everybody[1].do("elastic_configure", heartbeat_timeout_s=PATIENCE_S)
        joining = everybody[1].start("elastic_join", world="w", port=holder.port)
        while len(holder.view("w").members) < 3:
            await asyncio.gather(*(each.do("elastic_update", world="w") for each in (everybody[0], everybody[2])))
        await joining
        check(await reduce(), WEIGHTS[:3])


async def test_frozen_member_is_evicted_and_rejoins_at_a_boundary_when_it_wakes(spawn: Spawn) -> None:
    async with rendezvous(PULSE_S, initial_members=3) as holder:
        everybody = await joined(spawn, 3, holder.port, PULSE_S)
        await everybody[0].do("elastic_fault", signum=signal.SIGSTOP, messages=5)
        tasks = reduce_all(everybody)
        outcomes = await asyncio.gather(*tasks[1:])
        assert outcomes[0]["bits"] == outcomes[1]["bits"]
        assert [outcome["size"] for outcome in outcomes] == [2, 2]
        everybody[0].signal(signal.SIGCONT)
        with pytest.raises(EvictedError):
            await tasks[0]
        held = await everybody[0].do("elastic_held")
        assert held["values"] == [WEIGHTS[0] * (index + 1) for index in range(len(COUNTS))], "its tensors are unchanged"

        await everybody[0].do("elastic_leave", world="w")
        coming = everybody[0].start("elastic_join", world="w", port=holder.port)
        await until(lambda: holder._worlds["w"].coordinator._waiting)
        again = await asyncio.gather(*reduce_all(everybody[1:], counts=[10]))
        assert [outcome["size"] for outcome in again] == [2, 2], "no member is admitted before a boundary"
        views = [1, 1]
        while len(holder.view("w").members) < 3:  # until the members know that a new member waits
            views = await asyncio.gather(*(member.do("elastic_update", world="w") for member in everybody[1:]))
        place = await coming
        assert (place["view"], place["size"], place["rank"]) == (views[0], 3, 2)
        outcomes = await asyncio.gather(*reduce_all([*everybody[1:], everybody[0]]))
        assert len({outcome["bits"] for outcome in outcomes}) == 1
        assert outcomes[0]["contributors"] == [3] * len(COUNTS)


async def test_world_regroups_when_the_rendezvous_is_restarted_and_a_member_is_killed(
    spawn: Spawn, tmp_path: Path
) -> None:
    state, port = tmp_path / "state.json", free_port()
    async with rendezvous(initial_members=3, state_file=state, port=port):
        everybody = await joined(spawn, 3, port)
    outcomes = await asyncio.gather(*reduce_all(everybody))
    assert [outcome["retries"] for outcome in outcomes] == [0, 0, 0], "it continues without it"
    await everybody[0].do("elastic_fault", signum=signal.SIGKILL, messages=3)
    tasks = reduce_all(everybody)
    assert await everybody[0].ended() == -signal.SIGKILL
    async with rendezvous(initial_members=3, state_file=state, port=port, regroup_timeout_s=8.0) as holder:
        outcomes = await asyncio.gather(*tasks[1:])
        assert [outcome["size"] for outcome in outcomes] == [2, 2]
        assert outcomes[0]["bits"] == outcomes[1]["bits"]
        assert holder.view("w").number == 2


@pytest.mark.parametrize("restarted", [True, False])
async def test_all_survivors_fail_when_the_rendezvous_is_gone_or_has_lost_its_state(
    spawn: Spawn, restarted: bool
) -> None:
    port = free_port()
    async with rendezvous(initial_members=3, port=port):
        everybody = await joined(spawn, 3, port, view_change_timeout_s=60.0 if restarted else 3.0)
    async with rendezvous(initial_members=3, port=port) if restarted else contextlib.nullcontext():
        await everybody[0].do("elastic_fault", signum=signal.SIGKILL, messages=3)
        for task in reduce_all(everybody)[1:]:
            with pytest.raises((RendezvousError, ViewChangeError), match="knows no world" if restarted else None):
                await task


async def test_minority_does_not_continue_when_cut_off_from_the_rendezvous(spawn: Spawn) -> None:
    async with rendezvous(PULSE_S, initial_members=3, addr=HOST) as holder, proxy_to(holder.port) as proxy:
        everybody = [await spawn() for _ in range(3)]
        joining = []
        for member, port in zip(everybody, (proxy.port, holder.port, holder.port), strict=True):
            await member.do("elastic_configure", heartbeat_timeout_s=PULSE_S)
            joining.append(member.start("elastic_join", world="w", port=port, addr=HOST, host="127.0.0.1"))
        await asyncio.gather(*joining)
        assert all(outcome["success"] for outcome in await asyncio.gather(*reduce_all(everybody, counts=[10])))
        proxy.freeze()
        await until(lambda: len(holder.view("w").members) != 3)
        tasks = reduce_all(everybody)
        with pytest.raises((RendezvousError, ViewChangeError, EvictedError)):
            await tasks[0]
        outcomes = await asyncio.gather(*tasks[1:])
        assert [outcome["size"] for outcome in outcomes] == [2, 2]


@pytest.mark.parametrize("timeout_s", [0.5, None])
async def test_others_continue_when_one_member_cancels_its_call_or_exceeds_its_own_timeout(
    spawn: Spawn, timeout_s: float | None
) -> None:
    async with rendezvous(initial_members=3) as holder:
        everybody = await joined(spawn, 3, holder.port)
        hasty = everybody[0].start("elastic_reduce", world="w", weight=1.0, counts=COUNTS, timeout_s=timeout_s)
        if timeout_s is None:
            await everybody[0].do("elastic_state", world="w")
            hasty.cancel()
            await asyncio.wait([hasty])
            await everybody[0].do("threads")  # its call is cancelled by now
        else:
            with pytest.raises(ViewChangeError, match=r"over 0\.5 s"):
                await hasty
        outcomes = await asyncio.gather(*reduce_all(everybody[1:]))
        assert [outcome["size"] for outcome in outcomes] == [2, 2]
