"""Alerts of a running service: they fire, reach a webhook through Alertmanager, and are resolved when the fault is healed."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from multiworld_serving.testing.load import clients as load
from multiworld_serving.testing.load.clients import ReferenceRequest
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService
from tests.e2e.prometheus_server import PrometheusServer, running_prometheus, wait_until_answers
from tests.http_server import QuietHandler, serving
from tests.programs import free_port, process, program
from tests.services import small_service

pytestmark = pytest.mark.timeout(400)

DEPLOYED = Path(__file__).parents[2] / "deploy" / "alertmanager" / "alertmanager.yml"


class Webhook:
    """The notifications sent to a pager and a ticket system: (path, alert, status), in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, str]] = []
        self.news = threading.Condition()

    def has(self, path: str, alert: str, status: str) -> bool:
        """Whether this notification has arrived."""
        with self.news:
            return (path, alert, status) in self.told

    def wait_for(self, path: str, alert: str, status: str, timeout_s: float = 90.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        with self.news:
            while (path, alert, status) not in self.told:
                assert self.news.wait(deadline_s - time.monotonic()), f"no {alert} {status} at {path}: {self.told}"


@contextmanager
def webhook() -> Iterator[tuple[Webhook, str]]:
    """A webhook server while the block lasts, and its URL."""
    heard = Webhook()

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with heard.news:
                for alert in message["alerts"]:
                    heard.told.append((self.path, alert["labels"]["alertname"], alert["status"]))
                heard.news.notify_all()
            self.answer(200)

    with serving(Handler) as url:
        yield heard, url


@contextmanager
def alertmanager(folder: Path, webhook_url: str) -> Iterator[str]:
    """Alertmanager with the deployed configuration and a group wait of one second. Gives HOST:PORT."""
    binary = program("prometheus-alertmanager")
    config = DEPLOYED.read_text().replace("http://127.0.0.1:9095", webhook_url)
    folder.mkdir()
    (folder / "alertmanager.yml").write_text(re.sub(r"(group_wait|group_interval): \w+", r"\1: 1s", config))
    address = f"127.0.0.1:{free_port()}"
    with (
        (folder / "log").open("w") as log,
        process(
            binary,
            f"--config.file={folder / 'alertmanager.yml'}",
            f"--storage.path={folder / 'data'}",
            f"--web.listen-address={address}",
            "--cluster.listen-address=",
            log=log,
        ),
    ):
        wait_until_answers(f"http://{address}/-/ready")
        yield address


def test_alerts_reach_the_webhook_and_are_resolved_when_the_fault_is_healed(tmp_path: Path) -> None:
    prometheus_folder = tmp_path / "prometheus"
    prometheus_folder.mkdir()
    metrics_port = free_port()
    with (
        webhook() as (heard, url),
        alertmanager(tmp_path / "alertmanager", url) as address,
        running_prometheus(
            prometheus_folder, f"http://127.0.0.1:{metrics_port}/metrics", alertmanager=address, alert_for="0s"
        ) as prometheus,
    ):
        heard.wait_for("/page", "LeaderDown", "firing")
        with small_service(replicas=2, metrics_port=metrics_port) as service:
            heard.wait_for("/page", "LeaderDown", "resolved")
            prometheus.wait_for("multiworld_redundancy == 1")
            # Frozen, not killed: the supervisor would replace a killed worker before the alert could fire.
            first, second = service.worker_pids().values()
            os.kill(first, signal.SIGSTOP)
            heard.wait_for("/ticket", "ServiceDegraded", "firing")
            os.kill(second, signal.SIGSTOP)
            heard.wait_for("/page", "StageDown", "firing")
            for pid in (first, second):
                os.kill(pid, signal.SIGCONT)
            heard.wait_for("/page", "StageDown", "resolved")
            heard.wait_for("/ticket", "ServiceDegraded", "resolved")
            assert "RequestsLost" not in {alert for _, alert, _ in heard.told}


WINDOWS = {
    "1m": "5s",  # QueueSaturated
    "5m": "5s",
    "1h": "15s",
    "30m": "45s",  # the slow burn must be visible after the fast one, which suppresses it, has ended
    "6h": "60s",
    "10m": "90s",  # long enough for five failures
    "15m": "20s",  # HighDetectionTime
}
"""Shortened ranges of the rules. The thresholds are the deployed ones."""


@contextmanager
def stopped(service: LocalService) -> Iterator[None]:
    """All workers frozen while the block lasts."""
    pids = service.worker_pids().values()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def wait_until_gone(service: LocalService, worker: str) -> None:
    """Wait until the leader has detected it."""
    deadline_s = time.monotonic() + 60
    while service.worker_at(0, 0) == worker and time.monotonic() < deadline_s:
        time.sleep(0.01)


def flap(service: LocalService, heard: Webhook) -> None:
    """Kill the worker of one slot repeatedly, up to a limit."""
    for _ in range(10):
        service.wait_until_complete(60.0)
        worker = service.worker_at(0, 0)
        assert worker is not None
        os.kill(service.worker_pids()[worker], signal.SIGKILL)
        wait_until_gone(service, worker)
        if heard.has("/ticket", "WorldFlapping", "firing"):
            return
    heard.wait_for("/ticket", "WorldFlapping", "firing")


def stutter(service: LocalService, heard: Webhook, prometheus: PrometheusServer) -> None:
    """Freeze all workers repeatedly for less than the failure timeouts: answers are late, and the queue is full."""
    wanted = (("/ticket", "QueueSaturated", "firing"), ("/page", "LatencyBudgetBurnFast", "firing"))
    # Enough late answers that the slow burn outlasts the fast one: good answers soon halve the ratio.
    enough = "multiworld:requests_slow:ratio_rate30m > 0.2 and multiworld:requests_slow:ratio_rate6h > 0.2"
    deadline_s = time.monotonic() + 90
    while not (all(heard.has(*each) for each in wanted) and prometheus.query(enough)):
        assert time.monotonic() < deadline_s, heard.told
        with stopped(service):
            time.sleep(2.0)
        time.sleep(0.5)


def test_burn_rate_queue_detection_and_flapping_alerts_fire_and_resolve(
    tmp_path: Path,
) -> None:
    prometheus_folder = tmp_path / "prometheus"
    prometheus_folder.mkdir()
    settings: dict[str, Any] = {
        "heartbeat_timeout_s": 4,  # slow detection
        "recovery_grace_s": 0,  # errors at once while no worker is ready
        **{"queue_limit": 4, "max_batch_size": 1},
    }
    with (
        webhook() as (heard, url),
        alertmanager(tmp_path / "alertmanager", url) as address,
        small_service(replicas=2, **settings) as service,
        running_prometheus(
            prometheus_folder, service.metrics_url, alertmanager=address, alert_for="0s", windows=WINDOWS
        ) as prometheus,
        load.run_load(service.url, [ReferenceRequest(photo())], rate_hz=10),
    ):
        prometheus.wait_for("rate(multiworld_batch_size_count[5s]) > 0")
        flap(service, heard)
        service.wait_until_complete(60.0)

        stutter(service, heard, prometheus)
        heard.wait_for("/ticket", "QueueSaturated", "resolved")
        heard.wait_for("/page", "LatencyBudgetBurnFast", "resolved")
        heard.wait_for("/ticket", "LatencyBudgetBurnSlow", "firing")

        with stopped(service):
            heard.wait_for("/page", "StageDown", "firing")
            heard.wait_for("/page", "ErrorBudgetBurnFast", "firing")
            heard.wait_for("/ticket", "HighDetectionTime", "firing")
        heard.wait_for("/page", "StageDown", "resolved")
        heard.wait_for("/page", "ErrorBudgetBurnFast", "resolved")
        heard.wait_for("/ticket", "ErrorBudgetBurnSlow", "firing")
        for alert in ("HighDetectionTime", "LatencyBudgetBurnSlow", "ErrorBudgetBurnSlow", "WorldFlapping"):
            heard.wait_for("/ticket", alert, "resolved", timeout_s=150.0)
        assert "RequestsLost" not in {alert for _, alert, _ in heard.told}
