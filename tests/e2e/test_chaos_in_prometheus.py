"""Prometheus counts the faults that `multiworld chaos` reports, by stage, replica and cause."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.prometheus_server import PrometheusServer, running_prometheus
from tests.programs import free_port, program

pytestmark = pytest.mark.timeout(600)

ROUNDS = 2


def run_chaos(folder: Path, metrics_port: int) -> dict[str, Any]:
    """Kill and freeze workers of a separate service; returns the report as JSON."""
    file = folder / "chaos.json"
    # With several leaders each of them counts the failures of its own links.
    options = [
        "--leaders",
        "1",
        "--faults",
        "kill,freeze",
        "--rounds",
        str(ROUNDS),
        "--clients",
        "4",
        "--json",
        str(file),
    ]
    # Longer than several scrape intervals: the last fault must be scraped before the service ends.
    options += ["--settle", "5s", "--set", "image_size=32", "--set", f"metrics_port={metrics_port}"]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-m", "multiworld_serving.cli.main", "chaos", *options],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def counted(prometheus: PrometheusServer, name: str, *labels: str) -> Counter[tuple[str, ...]]:
    """The increase of a counter by labels, without series that stayed at 0."""
    tally: Counter[tuple[str, ...]] = Counter()
    for series in prometheus.query(f"max_over_time({name}[1h]) > 0"):
        tally[tuple(series["metric"][label] for label in labels)] += round(float(series["value"][1]))
    return tally


def test_prometheus_counts_the_faults_of_the_chaos_report(tmp_path: Path) -> None:
    program("prometheus")
    port = free_port()
    folder = tmp_path / "prometheus"
    folder.mkdir()
    with running_prometheus(folder, f"http://127.0.0.1:{port}/metrics") as prometheus:
        found = run_chaos(tmp_path, port)
        made: Counter[tuple[str, ...]] = Counter()
        for injection in found["injections"]:
            (victim,), (cause,) = injection["targets"], injection["causes"]
            stage, replica = victim.removeprefix("s").split(".r")
            made[stage, replica, cause] += 1
        assert made.total() == 2 * ROUNDS, "the faults fired"
        assert {cause for _, _, cause in made} == {"exit", "hang"}

        assert counted(prometheus, "multiworld_world_failures_total", "stage", "replica", "cause") == made
        by_cause = Counter({("exit",): ROUNDS, ("hang",): ROUNDS})
        assert counted(prometheus, "multiworld_failure_detection_seconds_count", "cause") == by_cause
        assert counted(prometheus, "multiworld_recovery_seconds_count", "cause") == by_cause
        rerouted = sum(injection["reroutes"] for injection in found["injections"])
        assert counted(prometheus, "multiworld_reroute_seconds_count").total() == rerouted
        assert counted(prometheus, "multiworld_duplicate_answers_total").total() == found["duplicates"] == 0
        assert counted(prometheus, "multiworld_requests_lost_total").total() == 0
