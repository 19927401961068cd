"""The GPU of each worker of a machine, and the metrics of the right one. NVML and CUDA are those of tests/fakes/nvml.py."""

import os
import sys

import pytest
import torch

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.workers.devices import device_of, pci_address
from multiworld_serving.workers.observability.gpu import GpuCollector
from tests.fakes.nvml import Gpu, install

PLAIN = Gpu(1), Gpu(2), Gpu(3)
DIVIDED = Gpu(1), Gpu(2, ("MIG-a", "", "MIG-b")), Gpu(3, ()), Gpu(4, can_be_divided=False)
Chosen = tuple[str, str | None]
"""Device and CUDA_VISIBLE_DEVICES of a worker."""


def chosen(patch: pytest.MonkeyPatch, gpus: tuple[Gpu, ...], visible: str | None, name: str, slot: int) -> Chosen:
    with patch.context() as own:  # each worker is a process
        install(own, *gpus, visible=visible)
        return str(device_of(name, slot)), os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("gpus", "visible", "workers"),
    [
        (PLAIN, None, [("cuda:0", None), ("cuda:1", None), ("cuda:2", None), ("cuda:0", None)]),
        (PLAIN, "2,0", [("cuda:0", "2,0"), ("cuda:1", "2,0"), ("cuda:0", "2,0")]),
        (PLAIN, "GPU-0003", [("cuda:0", "GPU-0003")] * 2),
        (DIVIDED, None, [("cuda:0", each) for each in ("GPU-0001", "MIG-a", "MIG-b", "GPU-0004", "GPU-0001")]),
        (DIVIDED, "3,1", [("cuda:0", each) for each in ("GPU-0004", "MIG-a", "MIG-b", "GPU-0004")]),
        (DIVIDED, "0,3", [("cuda:0", "0,3"), ("cuda:1", "0,3"), ("cuda:0", "0,3")]),
        (DIVIDED, "MIG-b, MIG-a", [("cuda:0", "MIG-b"), ("cuda:0", "MIG-a"), ("cuda:0", "MIG-b")]),
    ],
)
def test_workers_use_the_gpus_and_slices_that_they_may_see_in_turn(
    gpus: tuple[Gpu, ...], visible: str | None, workers: list[Chosen], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [chosen(monkeypatch, gpus, visible, "cuda", slot) for slot in range(len(workers))]
    assert found == workers


def test_a_device_with_a_number_is_that_one_at_every_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, PLAIN, None, "cuda:1", 2) == ("cuda:1", None)
    assert chosen(monkeypatch, DIVIDED, None, "cuda:2", 0) == ("cuda:0", "MIG-b")
    assert chosen(monkeypatch, (), None, "cpu", 1) == ("cpu", None)


@pytest.mark.parametrize(
    ("gpus", "visible", "name", "message"),
    [
        (PLAIN[:2], None, "cuda:2", "this machine has cuda:0 to cuda:1"),
        (DIVIDED, None, "cuda:4", "this machine has cuda:0 to cuda:3"),
        (PLAIN, "", "cuda", "this machine has no CUDA device"),
        ((), None, "cuda", "this machine has no CUDA device"),
    ],
)
def test_device_is_refused_when_it_does_not_exist(
    gpus: tuple[Gpu, ...], visible: str | None, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=message):
        chosen(monkeypatch, gpus, visible, name, 0)


def test_workers_use_the_gpus_in_turn_when_nvml_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *PLAIN)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert [str(device_of("cuda", slot)) for slot in (1, 4)] == ["cuda:1", "cuda:1"]


@pytest.mark.parametrize(
    ("gpus", "visible", "expected"),
    [
        (PLAIN, "2,0", {"utilization_ratio": 0.03, "temperature_celsius": 43.0, "power_watts": 3.0}),
        (DIVIDED, "MIG-b", {"temperature_celsius": 42.0, "power_watts": 2.0}),
    ],
)
def test_metrics_are_those_of_the_workers_gpu_when_cuda_numbers_gpus_differently(
    gpus: tuple[Gpu, ...], visible: str, expected: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, *gpus, visible=visible)
    device = device_of("cuda", 0)
    read = {
        metric.name.removeprefix("multiworld_gpu_"): metric.samples[0].value for metric in GpuCollector(device)._read()
    }
    assert read == {"memory_used_bytes": 1 << 30, "memory_total_bytes": 4 << 30, **expected}


def test_address_of_a_gpu_names_the_gpu_of_a_slice_and_is_empty_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *DIVIDED, visible="MIG-a")
    assert pci_address(device_of("cuda", 0)) == "00000000:02:00.0"
    assert pci_address(torch.device("cpu")) == ""
