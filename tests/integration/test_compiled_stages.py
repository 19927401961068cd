"""Stages that torch compiles: equal to the reference at every batch size, and replaced while they serve."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multiworld_serving.common.wire.protocol import rows_payload
from multiworld_serving.models.bundle.stage import load_bundle_stage
from multiworld_serving.models.errors import BundleError, CompileError, StageSpecError
from multiworld_serving.models.optimize.compiled import CompiledStage, batch_sizes
from multiworld_serving.models.optimize.deviation import TOLERANCE, deviation
from multiworld_serving.models.optimize.tuning import Tuning
from multiworld_serving.server.leader.versions.stage_plan import BundlePlan, make_bundle_plan
from multiworld_serving.workers.compute import engine as engine_module
from multiworld_serving.workers.compute.engine import Engine, LoadedStage, StageTask
from multiworld_serving.workers.stage_loader import AssignedStage
from tests.bundles import classifier_bundle, text_bundle
from tests.resnets import sent_weights
from tests.waiting import until

CPU = torch.device("cpu")
LARGEST = 2


def compiled(plan: BundlePlan, precision: str) -> CompiledStage:
    stage = load_bundle_stage(plan.spec, sent_weights(plan))
    return CompiledStage(stage, LARGEST, Tuning(precision, "compile"), CPU)


async def loaded(plan: BundlePlan, engine: Engine) -> LoadedStage:
    """A stage that a worker has loaded and compiles in the background."""
    stage = AssignedStage(plan.assignment(LARGEST, 2))

    def fetch() -> None:
        for chunk in plan.weights.chunks():
            stage.add(rows_payload(chunk))

    await stage.load(engine, stage, fetch)
    assert stage.loaded is not None
    return stage.loaded


def test_sizes_are_powers_of_two_and_the_largest() -> None:
    assert batch_sizes(1) == (1,)
    assert batch_sizes(6) == (1, 2, 4, 6)
    assert batch_sizes(8) == (1, 2, 4, 8)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@torch.inference_mode()
def test_compiled_stage_equals_the_reference_for_every_batch_size_and_number_of_threads(
    precision: str, tmp_path: Path
) -> None:
    plan = make_bundle_plan(classifier_bundle(tmp_path / "bundle"), 1)[0]
    made = compiled(plan, precision)
    for size in made.sizes:
        made.compile_for(size)
    stage = load_bundle_stage(plan.spec, sent_weights(plan))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in range(1, LARGEST + 1):
                batch = plan.spec.example(rows)
                given = batch.clone()
                output, expected = made(batch), stage(batch)
                assert output.shape == expected.shape
                assert deviation(output, expected, probabilities=precision != "float32") <= TOLERANCE[precision]
                assert torch.equal(batch, given)
    finally:
        torch.set_num_threads(before)
    with pytest.raises(StageSpecError, match="at most 2"):
        made(torch.zeros(3, *plan.spec.input_rows.dims, dtype=torch.uint8))
    with pytest.raises(BundleError, match="expected uint8"):
        made(torch.zeros(1, *plan.spec.input_rows.dims))


def test_every_size_is_called_until_its_cuda_graph_is_replayed_before_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU compiles in the first call, records in the second, and replays in the third."""
    calls = list[int]()

    def compile_nothing(module: nn.Module, **_: Any) -> Callable[..., Any]:
        def called(*inputs: Tensor) -> Any:
            calls.append(len(inputs[0]))
            return module(*inputs)

        return called

    monkeypatch.setattr(torch, "compile", compile_nothing)
    made = compiled(make_bundle_plan(classifier_bundle(tmp_path / "bundle"), 1)[0], "float32")
    for size in made.sizes:
        made.compile_for(size)
    assert calls == [size for size in made.sizes for _ in range(3)]


def test_code_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    plan = make_bundle_plan(classifier_bundle(tmp_path / "bundle"), 1)[0]
    made = compiled(plan, "float32")
    with torch.no_grad():
        for weight in made._folded.buffers():
            weight.mul_(1.5)
    with pytest.raises(CompileError, match=r"off at batch 1 where 0\.0001 is allowed"):
        made.compile_for(1)


def test_rows_of_different_lengths_are_not_compiled(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="its rows have different lengths"):
        compiled(make_bundle_plan(text_bundle(tmp_path / "bundle"), 1)[0], "float32")


async def test_stage_is_not_compiled_without_enough_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (plan,) = make_bundle_plan(classifier_bundle(tmp_path / "bundle"), 1, Tuning(optimize="compile"))

    def refuse(needed_bytes: int) -> None:
        raise MemoryError(f"needs {needed_bytes} bytes")

    monkeypatch.setattr(engine_module, "check_memory", refuse)
    engine = Engine(CPU)
    stage = await loaded(plan, engine)
    await until(lambda: "it cannot be compiled: needs" in caplog.text)
    assert str(stage.optimized.mode) == "fused/float32"
    engine.close()


async def test_stage_that_is_no_longer_served_is_not_compiled_further(tmp_path: Path) -> None:
    (plan,) = make_bundle_plan(classifier_bundle(tmp_path / "bundle"), 1, Tuning(optimize="compile"))
    engine = Engine(CPU)
    task = StageTask(plan.spec, sent_weights(plan), LARGEST, Tuning(optimize="compile"))
    asked = iter((True, False))
    assert await engine.compile(task, lambda: next(asked)) is None
    gc.collect()
    engine.close()
