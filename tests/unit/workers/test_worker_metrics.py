"""Metrics of a worker, its scrape port, and readings of a GPU."""

import socket
import threading
import time

import httpx
import pytest
import torch

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.http.metrics_port import metrics_port
from multiworld_serving.workers.observability import gpu
from multiworld_serving.workers.observability.gpu import GpuCollector
from multiworld_serving.workers.observability.metrics import WorkerMetrics
from tests.waiting import wait_until


def busy_worker() -> WorkerMetrics:
    """The metrics of a worker with a GPU, to which everything has happened that adds series."""
    metrics = WorkerMetrics()
    metrics.stage_loaded(0)
    collector = GpuCollector(CUDA, {name: (says, lambda device: 1.0) for name, (says, _) in gpu._READINGS.items()})
    collector._last = (time.monotonic(), list(collector._read()))
    metrics.registry.register(collector)
    return metrics


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics()


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
    async with metrics_port("127.0.0.1", 0, metrics.scrape) as port, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}"
        answer = await client.get(f"{url}/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert "multiworld_worker_busy 0.0\n" in answer.text
        assert (await client.get(f"{url}/")).status_code == 404
        assert (await client.get(f"{url}/healthz")).status_code == 200
        assert (await client.get(f"{url}/readyz")).status_code == 503
        assert (await client.post(f"{url}/metrics")).status_code == 405
    with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.1", port or 0), timeout=5):
        pass


async def test_busy_port_is_an_error_if_it_is_required(metrics: WorkerMetrics) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(UserError, match=r"cannot listen on 127\.0\.0\.1:"),
    ):
        async with metrics_port("127.0.0.1", other.getsockname()[1], metrics.scrape, required=True):
            pass


CUDA = torch.device("cuda:0")


def refuse(_: torch.device) -> float:
    raise RuntimeError("not supported")


def values(collector: GpuCollector) -> dict[str, float]:
    """The exported values by name, without the prefix."""
    metrics = {metric.name.removeprefix("multiworld_gpu_"): metric.samples for metric in collector.collect()}
    assert all(sample.labels == {"device": "cuda:0"} for samples in metrics.values() for sample in samples)
    return {name: samples[0].value for name, samples in metrics.items()}


def test_gpu_values_are_exported_and_unsupported_ones_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    reads = iter(range(100_000))
    readings = {"power_watts": ("", refuse), "temperature_celsius": ("", lambda _: float(next(reads)))}
    with GpuCollector(CUDA, readings, interval_s=0.01).running() as collector:
        wait_until(lambda: values(collector).get("temperature_celsius", 0) > 2)
        assert "power_watts" not in values(collector)
    assert [record.getMessage() for record in caplog.records] == ["no metric multiworld_gpu_power_watts: not supported"]


def test_readings_of_a_hanging_driver_expire_without_blocking() -> None:
    hung, begun = threading.Event(), list[float]()

    def utilization(_: torch.device) -> float:
        begun.append(time.monotonic())
        if len(begun) > 1:
            hung.wait(60)
        return 0.5

    readings = {"utilization_ratio": ("", utilization)}
    with GpuCollector(CUDA, readings, interval_s=0.01, stale_s=3600.0).running() as collector:
        wait_until(lambda: len(begun) >= 2)
        assert values(collector), "still fresh"
        collector._stale_s = 0.01
        wait_until(lambda: not values(collector))
        left_s = time.monotonic()
    assert time.monotonic() - left_s < 30, "it does not wait for the thread"
    hung.set()
