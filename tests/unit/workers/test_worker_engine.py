"""The computing thread of a worker: the order of jobs of different owners."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest
import torch

from multiworld_serving.models.bundle.files import read_bundle
from multiworld_serving.models.optimize.deviation import deviation
from multiworld_serving.models.optimize.tuning import Tuning
from multiworld_serving.server.leader.versions.stage_plan import make_bundle_plan
from multiworld_serving.workers.compute.engine import Engine, StageTask
from tests.bundles import PREVIEW
from tests.fakes.gpu import GPU, ILLEGAL_ACCESS
from tests.resnets import sent_stage, sent_weights
from tests.waiting import Gate


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(torch.device("cpu"))
    yield made
    made.close()


async def asked(engine: Engine, owner: str, *calls: Callable[[], object]) -> list[asyncio.Task[object]]:
    tasks = [asyncio.create_task(engine.run(owner, call)) for call in calls]
    await asyncio.sleep(0)
    return tasks


async def test_jobs_of_all_owners_run_in_the_order_of_submission(engine: Engine) -> None:
    done, gate = list[int](), Gate()
    tasks = await asked(engine, "one", gate, lambda: done.append(0))
    await gate.until_begun()
    tasks += await asked(engine, "other", lambda: done.append(1))
    tasks += await asked(engine, "one", lambda: done.append(2))
    gate.open()
    await asyncio.gather(*tasks)
    assert done == [0, 1, 2]


async def test_cancelled_jobs_do_not_start(engine: Engine) -> None:
    done, gate = list[str](), Gate()
    first = await asked(engine, "staying", gate)
    await gate.until_begun()
    dropped = await asked(engine, "leaving", lambda: done.append("leaving"))
    for task in dropped:
        task.cancel()
    kept = await asked(engine, "staying", lambda: done.append("staying"))
    gate.open()
    await asyncio.gather(*first, *kept)
    assert done == ["staying"]


async def test_engine_continues_when_a_job_raises(engine: Engine) -> None:
    with pytest.raises(ZeroDivisionError):
        await engine.run("one", lambda: 1 / 0)
    assert await engine.run("one", lambda: 7) == 7


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "message",
    [
        str(ILLEGAL_ACCESS),
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm",
        "CUDA driver error: unspecified launch failure",
        "Triton Error [CUDA]: an illegal memory access was encountered",
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
    ],
)
async def test_gpu_is_lost_to_the_process_when_it_fails_further_calls_after_an_error(
    engine: Engine, fails: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.device = GPU

    def synchronize(device: torch.device) -> None:
        assert device == GPU
        if fails:
            raise ILLEGAL_ACCESS

    def compute() -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(RuntimeError):
        await engine.run("one", compute)
    assert engine.device_failed is fails


async def test_error_on_a_cpu_is_no_loss_of_a_device(engine: Engine) -> None:
    with pytest.raises(ZeroDivisionError):
        await engine.run("one", lambda: 1 / 0)
    assert not engine.device_failed


async def test_thread_that_serves_measures_nothing_while_another_version_is_loaded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_bundle_plan(read_bundle(PREVIEW), 1)[0]
    task = StageTask(plan.spec, sent_weights(plan), 2, Tuning(optimize="fused"))
    first = engine.stages["first"] = await engine.load("one", task)
    first.row_threads, first.batch_threads = 3, 5
    monkeypatch.setattr(engine, "run", None)
    other = replace(task, spec=msgspec.structs.replace(plan.spec, version="2"))
    made = await engine.load("one", other)
    assert (made.row_threads, made.batch_threads) == (3, 5)


async def test_stage_is_computed_in_the_assigned_execution_mode(engine: Engine) -> None:
    plan = make_bundle_plan(read_bundle(PREVIEW), 1)[0]
    spec, weights, batch = plan.spec, sent_weights(plan), plan.spec.example(3)
    with torch.inference_mode():
        expected = sent_stage(plan)(batch)
    outputs = {}
    for ordered in ("eager", "fused"):
        made = await engine.load("one", StageTask(spec, weights, 2, Tuning(optimize=ordered)))
        assert str(made.optimized.mode) == f"{ordered}/float32"
        outputs[ordered] = (await engine.compute("one", made, batch)).output
    assert torch.equal(outputs["eager"], expected)
    assert deviation(outputs["fused"], expected) < 1e-5


async def test_batches_are_computed_while_a_further_stage_is_built(engine: Engine) -> None:
    plan, gate = make_bundle_plan(read_bundle(PREVIEW), 1)[0], Gate()
    engine.stages["first"] = made = await engine.load("one", StageTask(plan.spec, sent_weights(plan), 2))
    building = asyncio.create_task(engine.loader.run("other", gate))
    await gate.until_begun()
    assert engine.job_of("other") is not None
    await engine.compute("one", made, plan.spec.example(1))
    gate.open()
    await building
