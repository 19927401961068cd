"""The computing thread of a worker: the order of jobs of different sessions."""

import asyncio
import threading
from collections.abc import Callable

import pytest
import torch

from multiworld_serving.models.optimize.deviation import deviation
from multiworld_serving.models.optimize.tuning import Tuning
from multiworld_serving.workers.compute.engine import Engine, EngineQueue
from multiworld_serving.workers.compute.stage_store import StageTask
from tests.resnets import plan_of, sent_stage, sent_weights
from tests.unit.models.models_loaded import images, loaded


@pytest.fixture
def engine():  # type: ignore[no-untyped-def]
    made = Engine(torch.device("cpu"))
    yield made
    made.close()


class Gate:
    """A job that holds the thread until it is opened."""

    def __init__(self) -> None:
        self.begun, self._open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self._open.wait(60)

    def open(self) -> None:
        self._open.set()


async def asked(engine: Engine, queue: EngineQueue, *calls: Callable[[], object]) -> list[asyncio.Task[object]]:
    tasks = [asyncio.create_task(engine.run(queue, call)) for call in calls]
    await asyncio.sleep(0)
    return tasks


async def test_jobs_of_all_queues_run_in_the_order_of_submission(engine: Engine) -> None:
    one, other, done, gate = engine.new_queue(), engine.new_queue(), list[int](), Gate()
    tasks = await asked(engine, one, gate, lambda: done.append(0))
    await asyncio.to_thread(gate.begun.wait, 60)
    tasks += await asked(engine, other, lambda: done.append(1))
    tasks += await asked(engine, one, lambda: done.append(2))
    gate.open()
    await asyncio.gather(*tasks)
    assert done == [0, 1, 2]


async def test_only_the_queue_whose_job_runs_is_busy(engine: Engine) -> None:
    one, other, gate = engine.new_queue(), engine.new_queue(), Gate()
    tasks = await asked(engine, one, gate)
    await asyncio.to_thread(gate.begun.wait, 60)
    assert one.busy_s > 0
    assert other.busy_s == 0
    gate.open()
    await asyncio.gather(*tasks)


async def test_cancelled_jobs_do_not_start(engine: Engine) -> None:
    leaving, staying, done, gate = engine.new_queue(), engine.new_queue(), [], Gate()
    first = await asked(engine, staying, gate)
    await asyncio.to_thread(gate.begun.wait, 60)
    dropped = await asked(engine, leaving, lambda: done.append("leaving"))
    for task in dropped:
        task.cancel()
    kept = await asked(engine, staying, lambda: done.append("staying"))
    gate.open()
    await asyncio.gather(*first, *kept)
    assert done == ["staying"]


async def test_engine_continues_when_a_job_raises(engine: Engine) -> None:
    queue = engine.new_queue()
    with pytest.raises(ZeroDivisionError):
        await engine.run(queue, lambda: 1 / 0)
    assert await engine.run(queue, lambda: 7) == 7


async def test_batch_of_an_unassigned_stage_gets_an_error(engine: Engine) -> None:
    with pytest.raises(KeyError):
        await engine.new_queue().compute(1, 3, torch.zeros(1, 3, 8, 8, dtype=torch.uint8))


async def test_stage_is_computed_in_the_assigned_execution_mode(engine: Engine) -> None:
    plan = plan_of(loaded("resnet18"), 1)[0]
    spec, weights, queue, batch = plan.spec, sent_weights(plan), engine.new_queue(), images(3)
    with torch.inference_mode():
        expected = sent_stage(plan)(batch)
    outputs = {}
    for ordered in ("eager", "fused"):
        made = await queue.load(StageTask(spec, weights, 2, Tuning(optimize=ordered)))
        queue.serve(1, made)
        assert str(made.optimized.mode) == f"{ordered}/float32"
        outputs[ordered] = (await queue.compute(1, 0, batch)).output
    assert torch.equal(outputs["eager"], expected)
    assert 0 < deviation(outputs["fused"], expected) < 1e-5
