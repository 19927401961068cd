"""Stages on a GPU: compiled, with copies that overlap computation, and equal to the reference."""

import asyncio

import pytest
import torch

from multiworld.transport.memory import HostMemory
from multiworld.transport.segments import SegmentPool
from multiworld_serving.models.optimize.deviation import TOLERANCE, deviation
from multiworld_serving.models.optimize.tuning import Tuning
from multiworld_serving.workers.compute.engine import Engine, StageTask
from multiworld_serving.workers.compute.pinned_memory import PinnedMemory
from multiworld_serving.workers.compute.transfers import GpuTransfers
from tests.resnets import resnet_plan, sent_stage, sent_weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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


def test_output_is_copied_into_pinned_shared_memory_and_the_memory_is_unpinned_when_it_is_freed() -> None:
    device = torch.device("cuda", 0)
    pinned, transfers = PinnedMemory(device), GpuTransfers(device)
    for _ in range(200):  # a segment that stays pinned would make the next mapping at its address fail
        pool, there = SegmentPool(1 << 24, memory=HostMemory(pinned.register)), torch.rand(64, 3, 32, 32, device=device)
        output = transfers.to_host(there, allocate=pool.allocate)
        assert output.is_pinned()
        assert pool.find(output) is not None
        assert torch.equal(output, there.cpu())
        del output
        pool.close()
        assert pool.reserved_bytes == 0


@pytest.mark.parametrize("optimize", ["eager", "fused", "compile"])
async def test_engine_matches_the_reference(optimize: str) -> None:
    engine = Engine(torch.device("cuda", 0))
    (plan,) = resnet_plan("random:0", 1, image_size=64)
    task = StageTask(plan.spec, sent_weights(plan), LARGEST, Tuning(optimize=optimize))
    stage = await engine.load(task, task)
    if optimize == "compile":
        compiled = await engine.compile(task, lambda: True)
        assert compiled is not None
        stage = compiled
    batches = [
        torch.randint(0, 256, (1 + at % LARGEST, *plan.spec.input_rows.dims), dtype=torch.uint8) for at in range(20)
    ]
    answers = await asyncio.gather(*(engine.compute(task, stage, batch) for batch in batches))
    expected = sent_stage(plan)
    for batch, answer in zip(batches, answers, strict=True):
        with torch.inference_mode():
            assert deviation(answer.output, expected(batch)) <= 100 * TOLERANCE["float32"], "TF32 in the convolutions"
    engine.close()
