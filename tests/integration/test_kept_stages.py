"""Stages stay in the memory of a worker that has lost its leader, and the next leader sends no weights."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from multiworld import Cause
from multiworld_serving.server.leader.replicas.worker_link import WorkerLink
from multiworld_serving.server.leader.versions.stage_plan import BundlePlan
from multiworld_serving.workers.compute import engine as worker_engine
from multiworld_serving.workers.compute.engine import Engine, LoadedStage, StageTask
from multiworld_serving.workers.session import Session
from multiworld_serving.workers.stage_loader import AssignedStage
from tests.integration.test_links import Heard, ending_of, pair_with
from tests.resnets import resnet_plan
from tests.sent_batches import send
from tests.waiting import until

IMAGE_SIZE = 32
WAIT_S = 60.0


def plan_of(weights: str, number: int = 1) -> BundlePlan:
    return resnet_plan(weights, 2, number=number, image_size=IMAGE_SIZE)[1]


@pytest.fixture(scope="module")
def plan() -> BundlePlan:
    return plan_of("random:0")


@dataclass
class LeaderSide:
    """A leader with one link, in this process, and the worker's session with it."""

    heard: Heard
    plan: BundlePlan
    link: WorkerLink
    session: Session

    async def until(self, state: str) -> None:
        await self.heard.until(state)

    async def compute(self, batch: int, version: int = 1) -> Tensor:
        send(self.link, batch, torch.ones(2, *self.plan.spec.input_rows.dims), version)
        async with asyncio.timeout(WAIT_S):
            answer = await self.heard.results.get()
        assert (answer.sent.batch, answer.sent.version) == (batch, version)
        return answer.rows


@dataclass
class Worker:
    engine: Engine
    stack: contextlib.AsyncExitStack

    async def leader(self, plan: BundlePlan) -> LeaderSide:
        """A leader whose link is loading."""
        pair = await self.stack.enter_async_context(pair_with(self.engine))
        link = pair.link(plan)
        return LeaderSide(pair.heard, plan, link, await pair.session(link))

    async def until_stages(self, count: int) -> None:
        """Wait until so many stages are in memory."""
        await until(lambda: gc.collect() >= 0 and len(self.engine.stages) == count)


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with contextlib.AsyncExitStack() as stack:
        made = Worker(Engine(torch.device("cpu")), stack)
        yield made
    made.engine.close()


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the chunks of weights that the worker receives."""
    sizes: list[int] = []
    add = AssignedStage.add

    def counted(self: AssignedStage, chunk: memoryview) -> None:
        sizes.append(chunk.nbytes)
        add(self, chunk)

    monkeypatch.setattr(AssignedStage, "add", counted)
    return sizes


async def test_next_leader_uses_the_loaded_stage_without_sending_weights(
    worker: Worker, plan: BundlePlan, received: list[int]
) -> None:
    one = await worker.leader(plan)
    await one.until("ready")
    before = await one.compute(1)
    one.link.fail(Cause.EXIT, "killed")
    await one.until("broken")
    other = await worker.leader(replace(plan, number=5))  # each leader numbers its versions itself
    await other.until("ready")
    assert sum(received) == plan.weights.size
    assert len(worker.engine.stages) == 1
    assert torch.equal(await other.compute(1, version=5), before)


async def test_stage_is_freed_when_no_leader_has_assigned_it_for_a_while(
    worker: Worker, plan: BundlePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_engine, "KEEP_S", 0.05)
    one = await worker.leader(plan)
    await one.until("ready")
    one.link.close()
    await worker.until_stages(0)


async def test_stage_is_freed_before_another_one_is_loaded(worker: Worker, plan: BundlePlan) -> None:
    one = await worker.leader(plan)
    await one.until("ready")
    one.link.fail(Cause.EXIT, "killed")
    await one.until("broken")
    other = await worker.leader(plan_of("random:1"))
    await other.until("ready")
    await worker.until_stages(1)


async def test_next_leader_sends_the_weights_when_the_first_is_lost_while_it_loads(
    worker: Worker, plan: BundlePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, load, begun = await worker.leader(plan), worker.engine.load, asyncio.Event()

    async def load_for_the_other(owner: object, task: StageTask) -> LoadedStage:
        if owner is one.session:
            begun.set()
            await asyncio.Event().wait()  # it never returns
        return await load(owner, task)

    monkeypatch.setattr(worker.engine, "load", load_for_the_other)
    await begun.wait()
    one.link.fail(Cause.HANG, "no answer")
    other = await worker.leader(plan)
    await other.until("ready")
    assert len(worker.engine.stages) == 1


async def test_stage_is_loaded_again_when_it_has_failed_its_self_test(
    worker: Worker, plan: BundlePlan, received: list[int]
) -> None:
    wrong = replace(plan, self_test_output=plan.self_test_output + 1)
    one = await worker.leader(wrong)
    await one.until("broken")
    await worker.until_stages(0)
    other = await worker.leader(plan)
    await other.until("ready")
    assert sum(received) == 2 * plan.weights.size


async def test_stage_is_not_loaded_when_the_weights_do_not_have_the_announced_hash(worker: Worker) -> None:
    lying = plan_of("random:1")
    lying.weights.sha256 = "0" * 64
    bad = await worker.leader(lying)
    await bad.until("broken")
    assert "0000 was announced" in ending_of(bad.link).detail
    assert not worker.engine.stages
