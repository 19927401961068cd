"""Metrics of a worker, its scrape port, and readings of a GPU."""

from __future__ import annotations

import importlib.util
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from multiworld_serving.common.config import UserError
from multiworld_serving.common.http.metrics_port import metrics_port
from multiworld_serving.workers.observability import gpu
from multiworld_serving.workers.observability.gpu import GpuCollector
from multiworld_serving.workers.observability.metrics import WorkerMetrics
from tests.waiting import wait_until

NAMES = {
    "multiworld_build_info": ("gauge", {"version"}),
    "multiworld_worker_batches_total": ("counter", {"stage", "outcome"}),
    "multiworld_worker_compute_seconds": ("histogram", {"stage"}),
    "multiworld_worker_busy": ("gauge", set()),
    "multiworld_worker_leaders_connected": ("gauge", set()),
    "multiworld_worker_stages_loaded": ("gauge", set()),
    "multiworld_worker_worlds_joined_total": ("counter", set()),
    "multiworld_worker_worlds_ended_total": ("counter", {"cause"}),
}


def busy_worker() -> WorkerMetrics:
    """The metrics of a worker with a GPU, to which everything has happened that adds series."""
    metrics = WorkerMetrics({"version": "0.1.0"})
    metrics.stage_loaded(0)
    collector = GpuCollector(library(), CUDA)
    collector._last = (time.monotonic(), list(collector._read("handle")))
    metrics.registry.register(collector)
    return metrics


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics({"version": "0.1.0"})


def test_every_documented_name_is_exposed_with_its_labels(metrics: WorkerMetrics) -> None:
    metrics.stage_loaded(0)
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        if family.name.startswith("multiworld_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = (family.type, {label for sample in family.samples for label in sample.labels} - {"le"})
    assert found == NAMES


def test_state_of_the_worker_is_read_in_each_scrape(metrics: WorkerMetrics) -> None:
    state = {"busy": False, "stages": 0}
    metrics.watch(lambda: bool(state["busy"]), lambda: state["stages"])
    for busy, stages in ((True, 2), (False, 1)):
        state.update(busy=busy, stages=stages)
        value = metrics.registry.get_sample_value
        assert (value("multiworld_worker_busy"), value("multiworld_worker_stages_loaded")) == (busy, stages)


def test_unknown_stages_of_a_leader_share_one_series(metrics: WorkerMetrics) -> None:
    metrics.stage_loaded(0)
    before = metrics.text().count(b"\nmultiworld_")
    for stage in range(1, 1000):
        metrics.batch_ended(stage, "failed")
    assert metrics.text().count(b"\nmultiworld_") == before + 1
    labels = {"stage": "unknown", "outcome": "failed"}
    assert metrics.registry.get_sample_value("multiworld_worker_batches_total", labels) == 999


async def test_free_port_answers_scrapes_only(metrics: WorkerMetrics) -> None:
    async with metrics_port("127.0.0.1", 0, metrics) as port, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}"
        answer = await client.get(f"{url}/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert "multiworld_worker_busy 0.0\n" in answer.text
        assert (await client.get(f"{url}/")).status_code == 404
        assert (await client.post(f"{url}/metrics")).status_code == 405
    with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.1", port or 0), timeout=5):
        pass


async def test_busy_port_is_an_error_if_it_is_required(metrics: WorkerMetrics) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(UserError, match=r"cannot listen on 127\.0\.0\.1:"),
    ):
        async with metrics_port("127.0.0.1", other.getsockname()[1], metrics, required=True):
            pass


class NVMLError(Exception):
    """As that of pynvml."""


def library(**overrides: Callable[..., Any]) -> Any:
    """The functions of pynvml that the reader uses, with plausible results."""
    asked: dict[str, Any] = {
        "NVMLError": NVMLError,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByPciBusId": lambda bus_id: bus_id,
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=42),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=3 << 30, total=8 << 30),
        "nvmlDeviceGetTemperature": lambda handle, sensor: 55,
        "nvmlDeviceGetPowerUsage": lambda handle: 123_000,
    }
    return SimpleNamespace(**{**asked, **overrides})


CUDA = torch.device("cuda:0")


def refuse(*_: Any) -> Any:
    raise NVMLError("not supported")


def readings(collector: GpuCollector) -> dict[str, float]:
    """The exported values by name, without the prefix."""
    metrics = {metric.name.removeprefix("multiworld_gpu_"): metric.samples for metric in collector.collect()}
    assert all(sample.labels == {"device": "cuda:0"} for samples in metrics.values() for sample in samples)
    return {name: samples[0].value for name, samples in metrics.items()}


@pytest.fixture(autouse=True)
def _bus_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "pci_bus_id", lambda device: "00000000:3B:00.0")


def test_gpu_values_are_in_base_units_and_unsupported_ones_are_missing() -> None:
    with GpuCollector(library(nvmlDeviceGetPowerUsage=refuse), CUDA) as collector:
        wait_until(lambda: bool(readings(collector)))
        assert readings(collector) == {
            "utilization_ratio": 0.42,
            "memory_used_bytes": 3 << 30,
            "memory_total_bytes": 8 << 30,
            "temperature_celsius": 55,
        }
    with GpuCollector(library(), CUDA) as collector:
        wait_until(lambda: bool(readings(collector)))
        assert readings(collector)["power_watts"] == 123


def test_gpu_is_not_read_on_a_cpu_or_without_the_library() -> None:
    assert GpuCollector.of(torch.device("cpu")) is None
    if importlib.util.find_spec("pynvml") is None:
        assert GpuCollector.of(CUDA) is None


def test_readings_of_a_hanging_driver_expire_without_blocking() -> None:
    hung = threading.Event()
    begun: list[float] = []

    def utilization(_: object) -> Any:
        begun.append(time.monotonic())
        if len(begun) > 1:
            hung.wait(60)
        return SimpleNamespace(gpu=42)

    with GpuCollector(
        library(nvmlDeviceGetUtilizationRates=utilization), CUDA, interval_s=0.01, stale_s=2.0
    ) as collector:
        wait_until(lambda: len(begun) >= 2)
        assert readings(collector), "still fresh"
        wait_until(lambda: not readings(collector))
        left_s = time.monotonic()
    assert time.monotonic() - left_s < 30, "it does not wait for the thread"
    hung.set()


def test_failing_driver_is_logged_once_and_has_no_readings(caplog: pytest.LogCaptureFixture) -> None:
    with GpuCollector(library(nvmlInit=refuse), CUDA) as collector:
        wait_until(lambda: bool(caplog.records))
        assert readings(collector) == {}
    assert [record.getMessage() for record in caplog.records] == ["cannot read GPU metrics: not supported"]
