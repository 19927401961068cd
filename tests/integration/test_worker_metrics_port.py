"""A worker's own metrics, scraped over HTTP while it serves a leader."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService
from tests.integration.test_prometheus_files import check
from tests.programs import program
from tests.worker_process import metered_service

REQUESTS = 3


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalService, str]]:
    """A worker that has answered some requests."""
    with metered_service(tmp_path_factory.mktemp("served")) as (service, metrics_url):
        for _ in range(REQUESTS):
            assert predict(service) == 200
        yield service, metrics_url


def predict(service: LocalService) -> int:
    return httpx.post(
        f"{service.url}/predict", content=photo(), headers={"content-type": "image/jpeg"}, timeout=60
    ).status_code


def scrape(metrics_url: str) -> dict[str, float]:
    """Values by series."""
    text = httpx.get(metrics_url, timeout=30).text
    return {match[1]: float(match[2]) for match in re.finditer(r"^(\w+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)}


def test_worker_exports_its_batches_worlds_and_process(served: tuple[LocalService, str]) -> None:
    found = scrape(served[1])
    # The leader's join self-test is a batch as well.
    answered = found['multiworld_worker_batches_total{outcome="answered",stage="0"}']
    assert answered >= REQUESTS + 1
    assert found['multiworld_worker_batches_total{outcome="failed",stage="0"}'] == 0
    assert found['multiworld_worker_compute_seconds_count{stage="0"}'] == answered
    assert found['multiworld_worker_compute_seconds_sum{stage="0"}'] > 0
    assert found["multiworld_worker_leaders_connected"] == found["multiworld_worker_worlds_joined_total"] == 1
    assert found["multiworld_worker_busy"] in {0, 1}
    assert found["process_cpu_seconds_total"] > 0
    assert found["process_resident_memory_bytes"] > 50 * 2**20, "torch alone uses more"
    assert found["process_open_fds"] > 5
    assert any(series.startswith("multiworld_build_info{") for series in found)
    assert not any(series.startswith("multiworld_gpu_") for series in found), "it computes on the CPU"


def test_worker_and_leader_count_the_same_batches(served: tuple[LocalService, str]) -> None:
    service, metrics_url = served
    before = scrape(metrics_url)['multiworld_worker_batches_total{outcome="answered",stage="0"}']
    of_leader = service.metric("multiworld_stage_duration_seconds_count", phase="compute")
    for _ in range(REQUESTS):
        predict(service)
    after = scrape(metrics_url)['multiworld_worker_batches_total{outcome="answered",stage="0"}']
    assert after - before == REQUESTS
    assert service.metric("multiworld_stage_duration_seconds_count", phase="compute") - of_leader == REQUESTS


def test_metric_names_follow_the_prometheus_conventions(served: tuple[LocalService, str]) -> None:
    check(program("promtool"), "check", "metrics", stdin=httpx.get(served[1], timeout=30).content)


def probe(metrics_url: str, path: str) -> int:
    return httpx.get(metrics_url.removesuffix("/metrics") + path, timeout=30).status_code


def test_lost_leader_is_counted_and_scrapes_continue(tmp_path: Path) -> None:
    with metered_service(tmp_path) as (service, metrics_url):
        service.stop()
        deadline_s = time.monotonic() + 60
        while (found := scrape(metrics_url))["multiworld_worker_leaders_connected"] != 0:
            assert time.monotonic() < deadline_s, found
        ended = {series: value for series, value in found.items() if "worlds_ended_total" in series and value}
        assert list(ended.values()) == [1], ended
        assert [probe(metrics_url, path) for path in ("/healthz", "/readyz")] == [200, 503]
