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

from tests.e2e.prometheus_server import running_prometheus, wait_until_answers
from tests.http_server import QuietHandler, serving
from tests.programs import free_port, process, program
from tests.services import small_service

DEPLOYED = Path(__file__).parents[2] / "deploy" / "alertmanager" / "alertmanager.yml"


class Webhook:
    """The notifications sent to a pager and a ticket system: (path, alert, status), in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, str]] = []
        self.news = threading.Condition()

    def wait_for(self, path: str, alert: str, status: str, timeout_s: float = 150.0) -> None:
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
        with small_service(replicas=2, metrics_port=metrics_port, heartbeat_timeout_s=3) as service:
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
