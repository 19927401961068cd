"""Stages on a GPU: compiled, with copies that overlap computation, and equal to the reference."""

import asyncio

import pytest
import torch

from multiworld_serving.models.optimize.deviation import TOLERANCE, deviation
from multiworld_serving.models.optimize.tuning import Tuning
from multiworld_serving.workers.compute.engine import Engine
from multiworld_serving.workers.compute.stage_store import StageTask
from multiworld_serving.workers.compute.transfers import GpuTransfers
from tests.resnets import resnet_plan, sent_stage, sent_weights

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
LARGEST = 5


def test_batches_and_results_are_intact_when_copies_overlap_computation() -> None:
    device = torch.device("cuda", 0)
    way = GpuTransfers(device)
    batches = [torch.full((16, 3, 224, 224), float(value)) for value in range(32)]
    arriving = [way.to_device(batch) for batch in batches]
    for value, arrived in enumerate(arriving):
        there = arrived()
        assert there.device.type == "cuda"
        back = way.to_host(there * 2)
        assert torch.equal(back, batches[value] * 2)


@pytest.mark.parametrize("optimize", ["eager", "fused", "compile"])
async def test_engine_matches_the_reference(optimize: str) -> None:
    engine = Engine(torch.device("cuda", 0))
    (plan,) = resnet_plan("random:0", 1, image_size=64)
    queue, shape = engine.new_queue(), plan.input_shape
    task = StageTask(plan.spec, sent_weights(plan), LARGEST, Tuning(optimize=optimize))
    stage = await queue.load(task)
    if optimize == "compile":
        compiled = await queue.compile(task, lambda: True)
        assert compiled is not None
        stage = compiled
    queue.serve(1, stage)
    batches = [torch.randint(0, 256, (1 + at % LARGEST, *shape), dtype=torch.uint8) for at in range(20)]
    answers = await asyncio.gather(*(queue.compute(1, stage.spec.index, batch) for batch in batches))
    expected = sent_stage(plan)
    for batch, answer in zip(batches, answers, strict=True):
        with torch.inference_mode():
            assert deviation(answer.output, expected(batch)) <= 100 * TOLERANCE["float32"], "TF32 in the convolutions"
    engine.close()
