"""SchedulerDriver: a failing action, or false times from a worker, affects no other request, and every request gets an outcome."""

import asyncio
import logging
import time
from collections.abc import Callable
from itertools import chain, repeat
from typing import cast
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from torch import Tensor

from multiworld_serving.common.service.errors import RequestRejected, StageError
from multiworld_serving.common.service.predictor import Prediction
from multiworld_serving.common.wire.inputs import BatchInputs
from multiworld_serving.common.wire.work import Computed, Failed
from multiworld_serving.server.leader.replicas.worker import SentBatch, SlotId
from multiworld_serving.server.leader.replicas.worker_link import WorkerLink
from multiworld_serving.server.leader.scheduling.actions import Reject
from multiworld_serving.server.leader.scheduling.config import SchedulerConfig
from multiworld_serving.server.leader.scheduling.events import BatchDone, RequestArrived
from tests.unit.scheduling.driver_bench import DriverBench, Line, plan_without_stages

IMAGE = torch.zeros(3, 32, 32, dtype=torch.uint8)


class Bench(DriverBench):
    """Each stage returns the number of the first pixel of each sample."""

    def __init__(self, stages: int = 1, replicas: int = 2) -> None:
        super().__init__(SchedulerConfig(stages, batch_timeout_s=0.02, adaptive_batching=False), replicas)

    def ask(self, count: int) -> list[asyncio.Future[Prediction]]:
        return [self.begin(IMAGE[None] + number, request_id=str(number)) for number in range(count)]

    def ask_rows(self, count: int) -> asyncio.Future[Prediction]:
        return self.begin(torch.stack([IMAGE + at for at in range(count)]), count)

    async def work(
        self, asked: list[asyncio.Future[Prediction]], *, compute_ns: int = 0
    ) -> list[Prediction | BaseException]:
        """Compute each sent batch until every request has its outcome."""
        outcomes = asyncio.gather(*asked, return_exceptions=True)
        while not outcomes.done():
            for line in self.lines:
                while not line.sent.empty():
                    sent, inputs = line.sent.get_nowait()
                    self.compute(line, sent, first_pixels(inputs), compute_ns)
            await asyncio.sleep(0.001)
        return await outcomes

    def compute(self, line: Line, sent: SentBatch, output: Tensor, compute_ns: int = 0) -> None:
        self.report(line, sent, Computed(compute_ns, compute_ns, tuple(output.shape[1:])), output)


def first_pixels(inputs: BatchInputs) -> Tensor:
    assert inputs.relayed is not None
    first: Tensor = inputs.relayed.float().flatten(1)[:, :1]
    return first


def assert_right(answers: list[Prediction | BaseException]) -> None:
    for number, answer in enumerate(answers):
        assert isinstance(answer, Prediction), answer
        assert answer.output.tolist() == [[number]]


def failing_once(call: Callable[..., object]) -> Mock:
    return Mock(wraps=call, side_effect=chain([MemoryError("no room")], repeat(DEFAULT)))


@pytest.mark.parametrize("replicas", [1, 2])
async def test_requests_are_answered_when_their_batch_could_not_be_stacked(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(replicas=replicas)
    monkeypatch.setattr(torch, "cat", failing_once(torch.cat))
    answers = await bench.work(bench.ask(3))
    assert_right(answers)
    assert [answer.batch_size for answer in answers if isinstance(answer, Prediction)] == [2, 2, 1]


async def test_log_names_the_requests_of_a_batch_that_is_retried_isolated_and_rejected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(replicas=2)
    asked = bench.ask_rows(2), *bench.ask(1)
    outcomes = asyncio.gather(*asked, return_exceptions=True)
    while not outcomes.done():
        for line in bench.lines:
            while not line.sent.empty():
                sent, _ = line.sent.get_nowait()
                bench.report(line, sent, Failed("it raised"))
        await asyncio.sleep(0.001)
    assert all(isinstance(each, StageError) for each in await outcomes)
    told = [line.getMessage() for line in caplog.records if "request_id=" in line.getMessage()]
    for what, who in (("failed: it raised", "r,0"), ("retried", "r,0"), ("isolated", "r"), ("isolated", "0")):
        assert any(what in line and f"request_id={who} " in f"{line} " for line in told), (what, who, told)
    for who in ("r", "0"):
        assert [f"request_id={who} rejected reason=stage_error" in line for line in told].count(True) == 1


async def test_requests_get_an_error_when_their_answer_cannot_be_built() -> None:
    bench = Bench(replicas=1)
    asked = bench.ask(2)
    (line,) = bench.lines
    batch, _ = await line.sent.get()
    scalar = torch.zeros(1, 1)  # one sample too few: the link would have refused it
    bench.compute(line, batch, scalar)
    assert (await asked[0]).output.tolist() == [[0]]
    with pytest.raises(StageError, match="the leader failed: IndexError"):
        await asked[1]
    assert_right(await bench.work(bench.ask(2)))


async def test_stages_never_get_another_stages_input_when_an_output_could_not_be_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(stages=2, replicas=1)
    asked = bench.ask(2)
    first, second = bench.lines
    batch, inputs = await first.sent.get()
    keep = bench.driver.batches.keep
    monkeypatch.setattr(bench.driver.batches, "keep", failing_once(keep))
    bench.compute(first, batch, first_pixels(inputs))
    assert second.sent.empty()
    assert_right(await bench.work(asked))


async def test_wake_up_is_set_and_later_events_are_handled_when_the_scheduler_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    scheduler = bench.driver.scheduler
    monkeypatch.setattr(scheduler, "handle", failing_once(scheduler.handle))
    (failed,) = bench.ask(1)
    with pytest.raises(StageError, match="the leader failed: MemoryError"):
        await failed
    bench.driver.submit_event(RequestArrived(1000, time.monotonic() + 60))
    assert bench.driver._timer is not None
    assert_right(await bench.work(bench.ask(1)))


async def test_false_compute_times_count_at_most_the_elapsed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    handle = Mock(wraps=bench.driver.scheduler.handle)
    monkeypatch.setattr(bench.driver.scheduler, "handle", handle)
    began_s = time.monotonic()
    (answer,) = await bench.work(bench.ask(1), compute_ns=10**17)
    took_s = time.monotonic() - began_s
    assert isinstance(answer, Prediction)
    assert 0 < answer.compute_s <= took_s
    assert answer.transfer_s == 0
    (done,) = (call.args[0] for call in handle.call_args_list if isinstance(call.args[0], BatchDone))
    assert done.computed_s is not None
    assert done.computed_s <= took_s
    total_s = bench.metrics.registry.get_sample_value(
        "multiworld_stage_duration_seconds_sum", {"stage": "0", "replica": "0", "phase": "compute"}
    )
    assert total_s is not None
    assert total_s <= took_s


async def test_rows_of_one_request_are_answered_together_in_their_order() -> None:
    bench = Bench()
    count = 2 * bench.driver.scheduler.config.max_batch_size  # full batches: any of them may be the slowest
    asked = bench.ask_rows(count)
    [found] = await bench.work([asked])
    assert isinstance(found, Prediction)
    assert found.output.tolist() == [[at] for at in range(count)]
    assert found.batch_size == bench.driver.scheduler.config.max_batch_size
    assert (len(bench.driver.requests.pending), len(bench.driver.batches)) == (0, 0)


@pytest.mark.parametrize("ends", ["cancelled", "fails"])
async def test_other_rows_of_a_request_are_withdrawn_when_it_ends(ends: str) -> None:
    bench = Bench(replicas=1)
    asked = bench.ask_rows(30)
    await asyncio.sleep(0)
    assert bench.driver.scheduler.open_requests == 30
    if ends == "cancelled":
        asked.cancel()
    else:
        bench.driver._perform(Reject(3, "poison", "of this test"))
    await asyncio.gather(asked, return_exceptions=True)
    await asyncio.sleep(0)
    left = 0 if ends == "cancelled" else 1  # the scheduler itself has closed number 3
    assert bench.driver.scheduler.open_requests == left
    assert len(bench.driver.requests.pending) == 0


async def test_all_rows_of_a_request_are_computed_by_one_version_when_it_changes_meanwhile() -> None:
    bench = Bench(replicas=1)
    [line] = bench.lines
    asked = bench.ask_rows(20)
    new = Line(SlotId(0, 7))
    bench.lines.append(new)
    following = plan_without_stages(2)
    bench.versions.switch_to(following)
    bench.driver.activate(cast(WorkerLink, new), following)
    [found] = await bench.work([asked])
    assert isinstance(found, Prediction)
    assert found.output.tolist() == [[at] for at in range(20)]
    assert found.version_number == 2
    assert line.sent.empty()


@pytest.mark.parametrize("forgets", [False, True])
async def test_request_without_an_outcome_is_counted_as_lost(
    forgets: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    if forgets:  # a bug, which must never happen
        monkeypatch.setattr(bench.driver.requests, "reject", lambda action: None)
    asked = bench.begin(IMAGE[None], lasts_s=-1.0)
    await asyncio.sleep(0)
    with caplog.at_level(logging.CRITICAL):
        bench.driver.requests.report_lost()
    with pytest.raises(RequestRejected):
        await asked
    assert bench.metrics.registry.get_sample_value("multiworld_requests_lost_total") == forgets
