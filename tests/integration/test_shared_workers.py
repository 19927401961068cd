"""Two leaders' links to one worker: one copy of each stage, assigned by the first leader, and no effect of one leader on the other."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from multiworld import Cause
from multiworld_serving.server.leader.replicas.worker import AssignmentRefusedError
from multiworld_serving.server.leader.replicas.worker_link import WorkerLink
from multiworld_serving.server.leader.versions.stage_plan import StagePlan
from multiworld_serving.workers import session as worker_session
from multiworld_serving.workers.compute.engine import Engine, LoadedStage, StageTask
from multiworld_serving.workers.leader_order import LeaderOrder, LeaderPlace
from multiworld_serving.workers.session import Session
from multiworld_serving.workers.stage_loader import AssignedStage
from tests.integration.test_links import Heard, ending_of, pair_with
from tests.resnets import resnet_plan
from tests.sent_batches import send
from tests.waiting import until

IMAGE_SIZE = 32
WAIT_S = 60.0


def plan_of(weights: str, number: int = 1) -> StagePlan:
    return resnet_plan(weights, 2, number=number, image_size=IMAGE_SIZE)[1]


@pytest.fixture(scope="module")
def plan() -> StagePlan:
    return plan_of("random:0")


@pytest.fixture(scope="module")
def second() -> StagePlan:
    return plan_of("random:1", 2)


@dataclass
class LeaderSide:
    """A leader with one link, in this process, and the worker's session with it."""

    heard: Heard
    plan: StagePlan
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
class SharedWorker:
    engine: Engine
    stack: contextlib.AsyncExitStack

    async def leader(self, plan: StagePlan, place: LeaderPlace | None = None) -> LeaderSide:
        """A further leader whose link is loading."""
        pair = await self.stack.enter_async_context(pair_with(self.engine))
        link = pair.link(plan)
        return LeaderSide(pair.heard, plan, link, await pair.session(link, place=place))

    async def until_stages(self, count: int) -> None:
        """Wait until so many stages are in memory."""
        await until(lambda: gc.collect() >= 0 and len(self.engine.stages) == count)


@pytest.fixture
async def worker() -> AsyncIterator[SharedWorker]:
    async with contextlib.AsyncExitStack() as stack:
        made = SharedWorker(Engine(torch.device("cpu")), stack)
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


async def test_second_leader_uses_the_loaded_stage_without_sending_weights(
    worker: SharedWorker, plan: StagePlan, received: list[int]
) -> None:
    one = await worker.leader(plan)
    await one.until("ready")
    other = await worker.leader(replace(plan, number=5))  # each leader numbers its versions itself
    await other.until("ready")
    assert sum(received) == plan.weights.size
    assert len(worker.engine.stages) == 1
    assert torch.equal(await one.compute(1), await other.compute(1, version=5))


async def test_leaders_that_assign_a_stage_at_the_same_time_load_it_once(
    worker: SharedWorker, plan: StagePlan, received: list[int]
) -> None:
    one, other = await worker.leader(plan), await worker.leader(plan)
    await one.until("ready")
    await other.until("ready")
    assert sum(received) == plan.weights.size
    assert len(worker.engine.stages) == 1


async def test_second_leader_sends_the_weights_when_the_first_is_lost_while_it_loads(
    worker: SharedWorker, plan: StagePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, load = await worker.leader(plan), worker.engine.load

    async def load_for_the_other(owner: object, task: StageTask) -> LoadedStage:
        if owner is one.session:
            await asyncio.Event().wait()  # it never returns
        return await load(owner, task)

    monkeypatch.setattr(worker.engine, "load", load_for_the_other)
    other = await worker.leader(plan)
    await one.until("warming")
    one.link.fail(Cause.HANG, "no answer")
    await other.until("ready")
    assert len(worker.engine.stages) == 1


async def test_stage_of_a_lost_leader_stays_for_the_other_and_is_freed_with_it(
    worker: SharedWorker, plan: StagePlan
) -> None:
    one, other = await worker.leader(plan), await worker.leader(plan)
    await one.until("ready")
    await other.until("ready")
    before = await other.compute(1)
    one.link.fail(Cause.EXIT, "killed")
    assert torch.equal(await other.compute(2), before)
    assert len(worker.engine.stages) == 1
    other.link.close()
    await worker.until_stages(0)


async def test_stage_is_not_loaded_when_the_weights_do_not_have_the_announced_hash(
    worker: SharedWorker, plan: StagePlan
) -> None:
    good = await worker.leader(plan)
    await good.until("ready")
    lying = plan_of("random:1")
    lying.weights.sha256 = "0" * 64
    bad = await worker.leader(lying)
    await bad.until("broken")
    assert "0000 was announced" in ending_of(bad.link).detail
    assert len(worker.engine.stages) == 1


async def test_worker_refuses_what_the_leader_that_it_obeys_has_not_assigned(
    worker: SharedWorker, plan: StagePlan, second: StagePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_session, "_REPORT_S", 0.01)
    order = LeaderOrder()
    with order.linked(0, "acting") as first, order.linked(1, "standby") as later:
        acting = await worker.leader(plan, place=first)
        await acting.until("ready")
        standby = await worker.leader(plan, place=later)
        await standby.until("ready")
        await until(lambda: standby.link.worker.obeys == "acting")
        with pytest.raises(AssignmentRefusedError, match="it obeys leader acting"):
            await standby.link.load((second,))
        assert standby.link.worker.state == "draining"
        assert acting.link.worker.state == "ready"
        await acting.link.load((second,))
        assert len(worker.engine.stages) == 2


async def test_first_assignment_is_refused_without_blaming_the_worker(
    worker: SharedWorker, plan: StagePlan, second: StagePlan
) -> None:
    order = LeaderOrder()
    with order.linked(0, "acting") as first, order.linked(1, "standby") as later:
        acting = await worker.leader(plan, place=first)
        await acting.until("ready")
        standby = await worker.leader(second, place=later)
        await standby.until("broken")
        assert ending_of(standby.link).cause == Cause.LEFT
        assert "it obeys leader acting" in ending_of(standby.link).detail
