"""Copies between host memory and a GPU, with the fake GPU of tests/fakes/gpu.py; tests/integration/test_gpu_stages.py needs a real one."""

import asyncio
import threading
import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from multiworld_serving.workers.compute.engine import ComputedBatch, Engine, LoadedStage
from multiworld_serving.workers.compute.transfers import GpuTransfers
from tests.fakes import gpu
from tests.fakes.gpu import GPU, FakeEvent, FakeStream, PinnedTensor, current, install_streams, on_gpu
from tests.waiting import until, wait_until


def test_batch_in_memory_of_a_producer_is_kept_until_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    install_streams(monkeypatch)
    transfers, released = GpuTransfers(GPU), threading.Event()
    FakeEvent.running.clear()
    batch = torch.full((4,), 5.0).as_subclass(PinnedTensor)
    weakref.finalize(batch, released.set)
    arrived = transfers.to_device(batch)
    del batch
    with current(FakeStream()) as computing:
        there = arrived()
        assert there.tolist() == [77.0] * 4, "it is not copied yet"
        assert not released.is_set()
        computing.synchronize()
        assert there.tolist() == [5.0] * 4, "what is computed waits for the copy"
    FakeEvent.running.set()
    wait_until(released.is_set)


def test_stage_in_python_may_change_a_batch_in_memory_of_a_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    install_streams(monkeypatch)
    lent = torch.ones(4)
    GpuTransfers(GPU).writable(lent).add_(1)
    assert lent.tolist() == [1.0] * 4


class Computing:
    """An engine with the fake GPU, and a stage that adds one.

    Attributes:
        is_free: while it is not set, kernels wait.
        launched: number of kernels that the engine has queued.
        outputs: when the memory of each output is used again.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        install_streams(patch)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        self.engine = Engine(GPU)
        self.is_free, self.launched = threading.Event(), 0
        self.is_free.set()
        self.outputs = list[threading.Event]()
        spec: Any = SimpleNamespace(input_rows=SimpleNamespace(dtype=torch.float32))
        stage: Any = self.forward
        self.stage = LoadedStage(spec, stage, 1, 1)

    def forward(self, batch: Tensor) -> Tensor:
        source, output = batch.as_subclass(Tensor), torch.full_like(batch.as_subclass(Tensor), 77)
        self.launched += 1

        def kernel() -> None:
            assert self.is_free.wait(60)
            if source[0] < 0:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            output.copy_(source + 1)

        gpu._current().queue(kernel)
        return on_gpu(output)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        host = torch.full(tuple(shape), 55, dtype=dtype).as_subclass(PinnedTensor)
        self.outputs.append(dropped := threading.Event())
        weakref.finalize(host, dropped.set)
        return host

    def start(self, *values: float) -> list[asyncio.Task[ComputedBatch]]:
        """Compute a batch for each of these values."""
        batches = (torch.full((2,), value).as_subclass(PinnedTensor) for value in values)
        computing = (self.engine.compute("one", self.stage, batch, torch.float32, self.allocate) for batch in batches)
        return [asyncio.ensure_future(each) for each in computing]


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Computing]:
    made = Computing(monkeypatch)
    yield made
    made.is_free.set()
    made.engine.close()


async def test_next_batch_is_launched_before_the_engine_waits_for_the_output_of_the_last_one(
    computing: Computing,
) -> None:
    gate = threading.Event()
    blocked = asyncio.ensure_future(computing.engine.run("other", gate.wait, is_batch=True))
    computing.is_free.clear()
    tasks = computing.start(1.0, 2.0, 3.0)
    await asyncio.sleep(0)  # all are submitted
    gate.set()
    await until(lambda: computing.launched == 2)
    assert computing.engine.job_of("one") is not None, "a GPU that hangs is noticed"
    assert not any(task.done() for task in tasks)
    computing.is_free.set()
    found = await asyncio.gather(*tasks)
    assert [each.output.tolist() for each in found] == [[2.0] * 2, [3.0] * 2, [4.0] * 2]
    assert await blocked
    await until(lambda: not computing.engine.busy)


async def test_result_does_not_wait_until_a_stage_is_loaded(computing: Computing) -> None:
    gate, loading = threading.Event(), threading.Event()
    blocked = asyncio.ensure_future(computing.engine.run("other", gate.wait, is_batch=True))
    (task,) = computing.start(1.0)
    load = asyncio.ensure_future(computing.engine.run("other", loading.wait))
    await asyncio.sleep(0)
    gate.set()
    assert (await task).output.tolist() == [2.0] * 2
    assert not load.done()
    loading.set()
    assert await load
    assert await blocked


async def test_memory_of_an_output_is_kept_until_the_gpu_has_written_it_when_nobody_waits_any_more(
    computing: Computing,
) -> None:
    computing.is_free.clear()
    (task,) = computing.start(1.0)
    await until(lambda: len(computing.outputs) == 1)
    task.cancel()
    await asyncio.wait({task})
    assert not computing.outputs[0].is_set()
    computing.is_free.set()
    await until(computing.outputs[0].is_set)


async def test_error_of_a_kernel_fails_its_batch_and_the_device_is_checked(
    computing: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    (task,) = computing.start(-1.0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        await task
    assert not computing.engine.device_failed
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: torch.ones(2).view(3))
    (task,) = computing.start(-1.0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        await task
    assert computing.engine.device_failed
