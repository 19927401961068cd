"""Two workers and a leader's links: the second worker fetches its input from the first one."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
import torch
from msgspec.structs import replace

from multiworld import Cause
from multiworld_serving.common.edges.edges import Edges
from multiworld_serving.common.wire.inputs import ALL_ROWS, BatchInputs, RowRef, Source
from multiworld_serving.common.wire.join import EDGE_DTYPES, JoinRequest
from multiworld_serving.models.optimize.tuning import Tuning
from multiworld_serving.server.leader.replicas.worker_link import WorkerLink
from multiworld_serving.server.leader.versions.stage_plan import BundlePlan
from multiworld_serving.workers.compute.engine import Engine
from tests.integration.test_links import Heard, Returned, pair_with
from tests.resnets import resnet_plan, sent_stage
from tests.sent_batches import send
from tests.unit.edges.edge_parts import edges
from tests.waiting import until

WAIT_S = 60.0


@pytest.fixture
def plan(request: pytest.FixtureRequest) -> tuple[BundlePlan, ...]:
    edge_dtype, image_size = getattr(request, "param", ("float32", 32))
    return resnet_plan("random:0", 2, Tuning(edge_dtype=edge_dtype), image_size=image_size)


@dataclass
class Stage:
    """A worker of one stage, and a leader's link to it."""

    link: WorkerLink
    heard: Heard
    edges: Edges

    async def result(self) -> Returned:
        return await self.heard.results.get()


@pytest.fixture
async def stages(plan: tuple[BundlePlan, ...], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Stage]]:
    monkeypatch.setattr("multiworld_serving.common.edges.edge._FETCH_S", WAIT_S)
    engine = Engine(torch.device("cpu"))
    async with AsyncExitStack() as stack:
        made = []
        for each in plan:
            name = f"w{each.spec.index}"
            own = await stack.enter_async_context(edges(name))
            pair = await stack.enter_async_context(pair_with(engine))
            link = pair.link(each, request=JoinRequest(name, "cpu", "here", 1, edge=own.holder))
            await pair.session(link, own)
            await pair.heard.until("ready")
            made.append(Stage(link, pair.heard, own))
        yield made
    engine.close()


def images(rows: int) -> torch.Tensor:
    return torch.randint(0, 256, (rows, 3, 32, 32), dtype=torch.uint8)


def whole(holder: str, tensor: int, rows: int) -> BatchInputs:
    return BatchInputs(rows, (Source(holder, (RowRef(tensor, ALL_ROWS),), tuple(range(rows))),))


async def test_worker_reports_a_lost_input_and_serves_on(stages: list[Stage]) -> None:
    first, second = stages
    send(second.link, 1, whole(first.edges.holder, 77, 2), 1)
    send(second.link, 2, whole("127.0.0.1:1/abc", 1, 2), 1)
    lost = dict([await second.heard.lost.get(), await second.heard.lost.get()])
    assert "does not have it any more" in lost[1].why
    assert "the edge to 127.0.0.1:1/abc cannot be opened" in lost[2].why
    send(first.link, 3, images(1), 1)
    assert len((await first.result()).rows) == 1
    assert second.link.worker.state == "ready"


@pytest.mark.parametrize("plan", [("bfloat16", 32), ("float16", 32)], indirect=True)
async def test_outputs_travel_as_the_edge_dtype_and_answers_as_computed(
    stages: list[Stage], plan: tuple[BundlePlan, ...]
) -> None:
    first, second = stages
    batch, dtype = images(2), EDGE_DTYPES[plan[0].tuning.edge_dtype]
    send(first.link, 1, BatchInputs(2, (), batch, (0, 1)), 1)
    number = (await first.result()).kept.tensor
    there = first.edges.store.rows([RowRef(number, ALL_ROWS)])
    assert there is not None
    assert there.dtype == dtype
    send(second.link, 1, replace(whole(first.edges.holder, number, 2), keep=False), 1)
    answer = (await second.result()).rows
    with torch.inference_mode():
        expected = sent_stage(plan[1])(sent_stage(plan[0])(batch))
    torch.testing.assert_close(answer, expected, rtol=0.1, atol=1e-3)
    send(first.link, 2, batch, 1)
    relayed = (await first.result()).rows
    send(second.link, 2, relayed, 1)
    assert torch.equal(there, relayed)
    torch.testing.assert_close((await second.result()).rows, answer)


@pytest.mark.parametrize("lost", [True, False])
async def test_outputs_of_a_leader_are_freed_when_its_link_ends(
    stages: list[Stage], lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except the outputs of the last stage if the leader has closed the link: frontends may still fetch them."""
    monkeypatch.setattr("multiworld_serving.workers.session._UNCLAIMED_S", WAIT_S)
    first, last = stages
    send(first.link, 1, BatchInputs(1, (), images(1), (0,)), 1)
    send(last.link, 1, whole(first.edges.holder, (await first.result()).kept.tensor, 1), 1)
    await last.result()
    assert [len(each.edges.store) for each in stages] == [1, 1]
    for each in stages:
        if lost:
            each.link.fail(Cause.HANG, "of this test")
        else:
            each.link.close()
    await until(lambda: [len(each.edges.store) for each in stages] == [0, 0 if lost else 1])
