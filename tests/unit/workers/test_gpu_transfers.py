"""Copies between host memory and a GPU, with the fake GPU of tests/fake_gpu.py; tests/integration/test_gpu_stages.py needs a real one."""

import threading
import weakref

import pytest
import torch

from multiworld_serving.workers.compute.transfers import GpuTransfers
from tests.fake_gpu import GPU, FakeEvent, FakeStream, PinnedTensor, current, install_streams
from tests.waiting import wait_until


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
