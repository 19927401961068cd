"""Every query of a panel, annotation or rule returns data from a Prometheus that monitored a service while workers failed."""

import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from multiworld_serving.testing.load.clients import run_load as slow_load_on
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.load.requests import ReferenceRequest
from tests import dashboard_queries as written
from tests.chaos.clients import external_worker, run_load
from tests.chaos.injections import make_fault
from tests.dashboard_queries import dashboard_queries, recorded_names, rules_text, selectors
from tests.e2e.prometheus_server import PrometheusServer, running_prometheus
from tests.programs import free_port, program
from tests.services import service_for_workers, small_service

MOST = {"percentunit": 1.1, "s": 600.0, "reqps": 1e5, "ops": 1e5, "Bps": 1e11, "bytes": 1e12, "none": 1e7}
"""Maximum plausible value per unit; the minimum is 0, except for redundancy."""


QUESTIONS = (ReferenceRequest(photo()),)


@dataclass(frozen=True)
class Watched:
    """A finished run, recorded in Prometheus."""

    prometheus: PrometheusServer
    start_s: float
    end_s: float

    def range(self, expr: str) -> list[dict[str, object]]:
        # One second after the run: the last of the points, one second apart, must include the last scrape.
        return self.prometheus.query_range(expr, self.start_s, self.end_s + 1.0)


@pytest.fixture(scope="module")
def watched(token_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """One worker was killed and one frozen under load, and both were replaced. A worker of a second service has a metrics port."""
    program("prometheus")
    folder, port = tmp_path_factory.mktemp("watched"), free_port()
    with (
        # 3 s: on a busy machine no other worker may be taken for frozen.
        small_service(stages=2, replicas=2, frontends=2, heartbeat_timeout_s=3) as service,
        service_for_workers(token_file) as other,
        external_worker(other.join_address, name="metered", options=("--metrics-port", str(port))),
        running_prometheus(folder, service.metrics_url, worker_url=f"http://127.0.0.1:{port}") as prometheus,
    ):
        other.wait_until_complete(150.0)
        prometheus.wait_for("multiworld_redundancy == 1")
        with run_load(service), slow_load_on(other.url, QUESTIONS, rate_hz=2):
            prometheus.wait_for("rate(multiworld_batch_size_count[5s]) > 0")
            prometheus.wait_for('rate(multiworld_worker_batches_total{outcome="answered"}[5s]) > 0')
            start_s = time.time()
            make_fault(service, "kill", (0, 0))
            make_fault(service, "freeze", (1, 1))
            prometheus.wait_for("sum(multiworld_recovery_seconds_count) >= 2 and on () multiworld_redundancy == 1")
            prometheus.wait_for("sum(increase(multiworld_recovery_seconds_count[1m])) > 1")
            prometheus.wait_for("multiworld:failure_detection_seconds:p95_rate15m > 0")
            end_s = time.time()
        yield Watched(prometheus, start_s, end_s)


def values(series: list[dict[str, object]]) -> list[float]:
    return [float(value) for each in series for _, value in each["values"]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("file", written.DASHBOARDS, ids=lambda file: file.stem)
def test_every_dashboard_query_returns_plausible_data(watched: Watched, file: Path) -> None:
    problems = []
    for query in dashboard_queries(file):
        if re.search("multiworld_(gpu_|generate|first_token|between_tokens|session_)", query.expr):
            continue  # this service has no GPU and generates no text
        found = values(watched.range(query.filled_in("30s", "1m")))
        if not found:
            problems.append(f"{query.where} is empty: {query.expr}")
        elif not all(math.isfinite(value) for value in found):
            problems.append(f"{query.where} is not finite: {query.expr}")
        elif not (-1 if "redundancy" in query.expr else 0) <= min(found) <= max(found) <= MOST.get(query.unit, 1e12):
            problems.append(f"{query.where} is {min(found):g} to {max(found):g} {query.unit}: {query.expr}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", sorted(recorded_names()))
def test_every_recording_rule_has_a_series(watched: Watched, name: str) -> None:
    found = values(watched.range(name))
    assert found
    assert all(value >= 0 for value in found if not math.isnan(value))
    assert any(math.isfinite(value) for value in found)


def test_every_selector_of_a_rule_matches_series(watched: Watched) -> None:
    empty = [each for each in sorted(set(selectors(rules_text()))) if not watched.range(each)]
    assert not empty
