"""SchedulerDriver with data edges: it sends references, releases what is not needed, and relays requests on demand."""

import asyncio
from typing import cast

import pytest
import torch
from torch import Tensor

from multiworld_serving.common.service.predictor import Prediction
from multiworld_serving.common.wire.inputs import ALL_ROWS, RowRef, RowsLost, RowsLostError, Source
from multiworld_serving.common.wire.work import Computed
from multiworld_serving.server.leader.pipeline.inputs import RemoteInput, RequestInput
from multiworld_serving.server.leader.replicas.worker import SentBatch
from multiworld_serving.server.leader.replicas.worker_link import KeptOutput, WorkerLink
from multiworld_serving.server.leader.scheduling.config import SchedulerConfig
from tests.unit.scheduling.driver_bench import DriverBench, Line

IMAGE = torch.zeros(3, 4, 4, dtype=torch.uint8)
FRONTEND = "10.0.0.9:1/f"
RELAYED = "multiworld_relayed_bytes_total"


class Bench(DriverBench):
    """A driver with two stages of one replica each. Batches have one request, or two if `pairs`."""

    def __init__(self, pairs: bool = False) -> None:
        config = SchedulerConfig(
            2, max_batch_size=2 if pairs else 1, batch_timeout_s=60, adaptive_batching=False, hedge_factor=None
        )
        super().__init__(config, replicas=1, edges=True)
        self._tensor = 0

    async def ask(self, image: RequestInput, *, relay: bool = False) -> asyncio.Future[Prediction]:
        inputs = image[None] if isinstance(image, Tensor) else image
        asked = self.begin(inputs, relay=relay)
        await asyncio.sleep(0)
        return asked

    def kept(self, line: Line, sent: SentBatch) -> int:
        """The worker has computed the batch and keeps the output. Returns its id."""
        self._tensor += 1
        output = KeptOutput(cast(WorkerLink, line), self._tensor, len(sent.requests))
        self.report(line, sent, Computed(5, 5, (5,), self._tensor), output)
        return self._tensor


async def test_only_references_pass_the_leader_and_outputs_are_released() -> None:
    bench = Bench()
    first, second = bench.lines
    asked = await bench.ask(RemoteInput(FRONTEND, 7))
    batch, inputs = first.sent.get_nowait()
    assert [(each.holder, each.refs, each.at) for each in inputs.sources] == [(FRONTEND, (RowRef(7, 0),), (0,))]
    assert (inputs.keep, inputs.relayed) == (True, None)
    output = bench.kept(first, batch)
    batch, inputs = second.sent.get_nowait()
    assert [(each.holder, each.refs) for each in inputs.sources] == [(first.edge, (RowRef(output, ALL_ROWS),))]
    answer = bench.kept(second, batch)
    found = await asked
    assert found.kept == (Source(second.edge, (RowRef(answer, 0),), (0,)),)
    assert (first.released, second.released) == ([output], [])
    sent = [bench.metrics.registry.get_sample_value(RELAYED, {"sender": sender}) for sender in ("frontend", "worker")]
    assert not any(sent)
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


@pytest.mark.parametrize("stage", [0, 1])
async def test_requests_of_a_batch_are_ended_when_its_input_cannot_be_fetched(stage: int) -> None:
    bench = Bench(pairs=True)
    line = bench.lines[stage]
    asked = [await bench.ask(image) for image in (RemoteInput(FRONTEND, 1), IMAGE)]
    if stage:
        bench.kept(bench.lines[0], bench.lines[0].sent.get_nowait()[0])
    bench.report(line, line.sent.get_nowait()[0], RowsLost("far away"))
    for each in asked:
        with pytest.raises(RowsLostError, match="far away"):
            await each
    assert bench.lines[0].released == [1] * stage
    assert not len(bench.driver.batches)
    assert bench.driver.scheduler.open_requests == 0


async def test_relayed_requests_share_no_batch_with_others_and_all_outputs_pass_the_leader() -> None:
    bench = Bench(pairs=True)
    first, second = bench.lines
    for image, relay in ((IMAGE, True), (RemoteInput(FRONTEND, 1), False), (IMAGE + 1, True), (IMAGE, False)):
        await bench.ask(image, relay=relay)
    batch, inputs = first.sent.get_nowait()
    assert (inputs.sources, inputs.relayed_at, inputs.keep) == ((), (0, 1), False)
    assert first.sent.get_nowait()[1].keep
    bench.report(first, batch, Computed(5, 5, (5,)), torch.ones(2, 5))
    _, inputs = second.sent.get_nowait()
    assert torch.equal(inputs.relayed, torch.ones(2, 5))
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


async def test_requests_that_start_again_because_the_worker_with_their_input_was_lost_are_not_ended() -> None:
    bench = Bench()
    first, second = bench.lines
    asked = await bench.ask(RemoteInput(FRONTEND, 7))
    bench.kept(first, first.sent.get_nowait()[0])
    batch, _ = second.sent.get_nowait()
    bench.driver.remove(cast(WorkerLink, first))
    bench.report(second, batch, RowsLost("its producer has ended"))
    await asyncio.sleep(0)
    assert not asked.done()
