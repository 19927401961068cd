"""Cost of observability: throughput with all of it enabled, divided by throughput with all of it disabled.

    python -m benchmarks.observing_cost
    python -m benchmarks.observing_cost --model resnet50 --image-size 224 --seconds 10

Enabled: leader and workers are scraped every second in the format of Prometheus, a client reads `GET /events`, and every request writes a
line of JSON to the log. Disabled: none of these, and the workers have no metrics port. Two services run at the same time and are loaded in
turn. The scraper and the event reader are one process on the same cores. The result is the median of the ratios of consecutive turns, which
cancels slow changes in machine speed. CPU ms is the CPU time of leader and workers per answer. Exits with 1 when the result is below the
goal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks.connections import Connections, request_bytes
from benchmarks.ranks import table
from benchmarks.servers import cpu_s
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService

GOAL = 0.98
_ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.4"


def observe(events_url: str, metrics_urls: list[str], scrapes: Any, stop: Any) -> None:
    """Scrape metrics and read events until `stop` is set. Runs in a separate process. `scrapes` counts the rounds."""
    threading.Thread(target=_read_along, args=(events_url,), daemon=True).start()
    with httpx.Client(headers={"accept": _ACCEPT}, timeout=10) as client:
        while not stop.wait(1.0):
            for url in metrics_urls:
                client.get(url).raise_for_status()
            scrapes.value += 1


def _read_along(url: str) -> None:
    with httpx.Client(timeout=None) as client, client.stream("GET", url) as answer:
        for _ in answer.iter_bytes():
            pass


@contextlib.contextmanager
def observed(service: LocalService, workers: list[str]) -> Iterator[None]:
    """Run `observe` during the block. Raises AssertionError when it did not work."""
    context = multiprocessing.get_context("spawn")
    stop, scrapes = context.Event(), context.Value("i", 0)
    urls = [service.metrics_url, *workers]
    process = context.Process(target=observe, args=(f"{service.url}/events", urls, scrapes, stop))
    process.start()
    try:
        deadline_s = time.monotonic() + 60
        while not scrapes.value:  # do not measure the imports
            assert process.is_alive(), "the scraper ended"
            assert time.monotonic() < deadline_s, "no scrape"
            time.sleep(0.05)
        before = scrapes.value
        yield
        assert scrapes.value > before, "nobody scraped meanwhile"
    finally:
        stop.set()
        process.join()


@contextlib.contextmanager
def worker(leader: str, folder: Path, name: str, token: str, *, metrics: bool) -> Iterator[Path]:
    """Run one worker process during the block; yields its log file."""
    log = folder / f"{name}.log"
    options = ["--leader", leader, "--name", name, "--threads", "1", "--log-format", "json"]
    options += ["--metrics-port", "0"] if metrics else []
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MULTIWORLD_")}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "multiworld_serving.cli.main", "worker", *options],
            stderr=file,
            env={**environment, "MULTIWORLD_TOKEN": token},
        )
        try:
            yield log
        finally:
            process.terminate()
            process.wait()


def metrics_url(log: Path) -> str:
    """URL of the metrics of the worker that writes this log."""
    lines = (json.loads(line) for line in log.read_text().splitlines())
    return next(str(line["metrics"]) for line in lines if line["message"].startswith("listening "))


@contextlib.contextmanager
def service(options: argparse.Namespace, *, on: bool) -> Iterator[tuple[LocalService, list[str]]]:
    """A ready service and the metrics URLs of its workers."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        token = secrets.token_hex()
        (folder / "token").write_text(token)
        made = stack.enter_context(
            LocalService(
                model=options.model,
                weights="random:0",
                image_size=options.image_size,
                stages=2,
                replicas=1,
                external_workers=True,
                token_file=folder / "token",
                access_log=on,
                wait_until_ready=False,
            )
        )
        logs = [
            stack.enter_context(worker(made.join_address, folder, f"{name}", token, metrics=on)) for name in ("a", "b")
        ]
        made.wait_until_complete(120.0)
        yield made, [metrics_url(log) for log in logs] if on else []


def throughput(service: LocalService, clients: int, seconds: float) -> tuple[float, float]:
    """Answers per second in a closed loop, and CPU milliseconds of the service per answer."""
    request = request_bytes("/predict", "image/jpeg", photo())
    pids = [service.pid, *(replica["pid"] for stage in service.status()["stages"] for replica in stage["replicas"])]
    pids += [pid for kind in ("leader", "frontend") for pid in service.child_pids(kind).values()]
    before_s = sum(map(cpu_s, pids))
    outcome = uvloop.run(Connections(service.url).closed_loop(request, clients, seconds))
    assert outcome.statuses.keys() == {200}, outcome.statuses
    return outcome.goodput, 1e3 * (sum(map(cpu_s, pids)) - before_s) / outcome.statuses[200]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn")
    parser.add_argument("--turns", type=int, default=20, help="of each kind")
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
    with service(options, on=True) as (watched, workers), service(options, on=False) as (alone, _):
        for each in (watched, alone):
            throughput(each, options.clients, 1.0)  # warm-up
        for turn in range(options.turns):
            # Alternate the order, so that a drift in machine speed affects both.
            for kind in ("on", "off") if turn % 2 else ("off", "on"):
                if kind == "off":
                    found[kind].append(throughput(alone, options.clients, options.seconds))
                else:
                    with observed(watched, workers):
                        found[kind].append(throughput(watched, options.clients, options.seconds))
    rows = []
    for kind, turns in found.items():
        rates, cpu_ms = zip(*turns, strict=True)
        times = (statistics.median(rates), min(rates), max(rates), statistics.median(cpu_ms))
        rows.append([kind, *(f"{each:.1f}" for each in times)])
    columns = ("observing", "median 1/s", "min", "max", "CPU ms")
    table(f"{options.model}, {options.image_size} px, 2 workers, {options.turns} turns", columns, rows)
    shares = [on[0] / off[0] for on, off in zip(found["on"], found["off"], strict=True)]
    share = statistics.median(shares)
    print(
        f"on / off: {share:.3f} (goal {GOAL:g}; quarter of the turns below {statistics.quantiles(shares, n=4)[0]:.3f})"
    )
    return 0 if share >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
