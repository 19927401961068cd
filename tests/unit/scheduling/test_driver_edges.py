"""SchedulerDriver with data edges: it sends references, releases what is not needed, and relays what cannot be fetched."""

import asyncio
from typing import cast

import pytest
import torch
from torch import Tensor

from multiworld_serving.common.service.errors import InputUnreachableError
from multiworld_serving.common.service.predictor import Prediction
from multiworld_serving.common.wire.inputs import ALL_ROWS, RowRef, Source
from multiworld_serving.common.wire.work import Computed, LostInput
from multiworld_serving.server.leader.pipeline.inputs import RemoteInput, RequestInput
from multiworld_serving.server.leader.replicas.worker import SentBatch
from multiworld_serving.server.leader.replicas.worker_link import KeptOutput, WorkerLink
from multiworld_serving.server.leader.scheduling.config import SchedulerConfig
from tests.unit.scheduling.driver_bench import DriverBench, Line

IMAGE = torch.zeros(3, 4, 4, dtype=torch.uint8)
FRONTEND = "10.0.0.9:1/f"


class Bench(DriverBench):
    """A driver with two stages of one replica each. Batches have one request, or two if `pairs`."""

    def __init__(self, pairs: bool = False) -> None:
        config = SchedulerConfig(
            2, max_batch_size=2 if pairs else 1, batch_timeout_s=60, adaptive_batching=False, hedge_factor=None
        )
        super().__init__(config, replicas=1, edges=True)
        self._tensor = 0

    async def ask(self, image: RequestInput, fetcher: str | None = "f") -> asyncio.Future[Prediction]:
        inputs = image[None] if isinstance(image, Tensor) else image
        asked = self.begin(inputs, fetcher=fetcher)
        await asyncio.sleep(0)
        return asked

    def kept(self, line: Line, sent: SentBatch) -> int:
        """The worker has computed the batch and keeps the output. Returns its id."""
        self._tensor += 1
        output = KeptOutput(cast(WorkerLink, line), self._tensor, len(sent.requests))
        self.report(line, sent, Computed(5, 5, (5,), self._tensor), output)
        return self._tensor

    def lost(self, line: Line, sent: SentBatch, *holders: str, unreachable: bool = True) -> None:
        self.report(line, sent, LostInput(holders, holders if unreachable else (), "why"))

    @property
    def relayed(self) -> float:
        found = self.metrics.registry.get_sample_value
        return sum(
            found("multiworld_relayed_bytes_total", {"sender": sender}) or 0.0 for sender in ("frontend", "worker")
        )


async def test_only_references_pass_the_leader_and_outputs_are_released() -> None:
    bench = Bench()
    first, second = bench.lines
    asked = await bench.ask(RemoteInput(FRONTEND, 7))
    batch, inputs = first.sent.get_nowait()
    assert [(each.holder, each.refs, each.at) for each in inputs.sources] == [(FRONTEND, (RowRef(7, 0),), (0,))]
    assert (inputs.keep, inputs.expires_s, inputs.relayed) == (True, 0.0, None)
    output = bench.kept(first, batch)
    batch, inputs = second.sent.get_nowait()
    assert [(each.holder, each.refs) for each in inputs.sources] == [(first.edge, (RowRef(output, ALL_ROWS),))]
    assert inputs.expires_s > 0, "nobody tells the worker when frontends have fetched the answers"
    answer = bench.kept(second, batch)
    found = await asked
    assert found.kept == (Source(second.edge, (RowRef(answer, 0),), (0,)),)
    assert (first.released, second.released) == ([output], [])
    assert bench.relayed == 0
    assert not len(bench.driver.batches)


async def test_batch_has_rows_of_several_frontends_and_of_the_leader() -> None:
    bench = Bench(pairs=True)
    first = bench.lines[0]
    images = (RemoteInput("10.0.0.8:1/g", 3), IMAGE + 4, RemoteInput(FRONTEND, 5), RemoteInput("10.0.0.8:1/g", 6))
    for image in images:
        await bench.ask(image)
    _, inputs = first.sent.get_nowait()
    assert [(each.holder, each.refs, each.at) for each in inputs.sources] == [("10.0.0.8:1/g", (RowRef(3, 0),), (0,))]
    assert inputs.relayed_at == (1,)
    assert torch.equal(inputs.relayed, (IMAGE + 4)[None])
    _, inputs = first.sent.get_nowait()
    assert [(each.holder, each.at) for each in inputs.sources] == [(FRONTEND, (0,)), ("10.0.0.8:1/g", (1,))]


async def test_image_that_a_worker_cannot_fetch_is_handed_back_and_others_start_again() -> None:
    bench = Bench(pairs=True)
    first = bench.lines[0]
    far = await bench.ask(RemoteInput(FRONTEND, 1))
    await bench.ask(RemoteInput("10.0.0.8:1/g", 2))
    batch, _ = first.sent.get_nowait()
    bench.lost(first, batch, FRONTEND)
    with pytest.raises(InputUnreachableError):
        await far
    again = await bench.ask(RemoteInput(FRONTEND, 5))
    await bench.ask(IMAGE)
    _, inputs = first.sent.get_nowait()
    assert [each.holder for each in inputs.sources] == ["10.0.0.8:1/g"]
    with pytest.raises(InputUnreachableError):  # known now: the worker is not asked again
        await again
    assert first.sent.empty()


async def test_batch_starts_again_and_is_relayed_when_workers_cannot_reach_each_other() -> None:
    bench = Bench()
    first, second = bench.lines
    await bench.ask(RemoteInput(FRONTEND, 7))
    output = bench.kept(first, first.sent.get_nowait()[0])
    batch, _ = second.sent.get_nowait()
    bench.lost(second, batch, first.edge)
    assert first.released == [output]
    batch, inputs = first.sent.get_nowait()
    assert not inputs.keep
    bench.report(first, batch, Computed(5, 5, (5,)), torch.ones(1, 5))
    batch, inputs = second.sent.get_nowait()
    assert torch.equal(inputs.relayed, torch.ones(1, 5))
    await bench.ask(RemoteInput(FRONTEND, 8))
    _, inputs = first.sent.get_nowait()
    assert not inputs.keep, "outputs of a worker that another one cannot reach are relayed"


@pytest.mark.parametrize("fetcher", [None, "f"])
async def test_answer_is_relayed_when_its_frontend_cannot_fetch_it(fetcher: str | None) -> None:
    bench = Bench()
    first, second = bench.lines
    if fetcher is not None:
        bench.driver.batches.relays.add(second.edge, fetcher)
    await bench.ask(RemoteInput(FRONTEND, 7), fetcher)
    bench.kept(first, first.sent.get_nowait()[0])
    _, inputs = second.sent.get_nowait()
    assert not inputs.keep


async def test_output_is_released_when_it_comes_too_late() -> None:
    bench = Bench()
    first, _ = bench.lines
    asked = await bench.ask(RemoteInput(FRONTEND, 7))
    batch, _ = first.sent.get_nowait()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    output = bench.kept(first, batch)
    assert first.released == [output]


@pytest.mark.parametrize("rejoins", [0, 1])
async def test_pair_is_tried_again_when_one_of_the_two_joins_again(rejoins: int) -> None:
    bench = Bench()
    first, second = bench.lines
    bench.driver.batches.relays.add(first.edge, second.worker.name)
    bench.driver.batches.relays.add(first.edge, "another")
    bench.driver.batches.relays.forget(bench.lines[rejoins].edge, bench.lines[rejoins].worker.name)
    await bench.ask(RemoteInput(FRONTEND, 7))
    assert first.sent.get_nowait()[1].keep is (rejoins == 0)


@pytest.mark.parametrize("worker_lives", [True, False])
async def test_only_worker_that_must_have_an_output_is_relayed_when_it_has_none(worker_lives: bool) -> None:
    bench = Bench()
    first, second = bench.lines
    asked = await bench.ask(RemoteInput(FRONTEND, 7))
    if not worker_lives:
        bench.lost(first, first.sent.get_nowait()[0], FRONTEND, unreachable=False)
        with pytest.raises(InputUnreachableError):
            await asked
        asked = await bench.ask(RemoteInput(FRONTEND, 8))
        assert first.sent.get_nowait()[1].sources, "a frontend frees inputs of requests that have ended"
    else:
        bench.kept(first, first.sent.get_nowait()[0])
        bench.lost(second, second.sent.get_nowait()[0], first.edge, unreachable=False)
        assert not first.sent.get_nowait()[1].keep
