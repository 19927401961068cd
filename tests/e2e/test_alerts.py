"""Alerts of a running service: they fire, reach a webhook through Alertmanager, and are resolved when the fault is healed."""

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.clients import external_worker
from tests.e2e.prometheus_server import running_prometheus, wait_until_answers
from tests.http_server import QuietHandler, serving
from tests.programs import free_port, process, program
from tests.services import service_for_workers
from tests.waiting import wait_until

DEPLOYED = Path(__file__).parents[2] / "deploy" / "alertmanager" / "alertmanager.yml"


Notification = tuple[str, str, str]
"""Path, alert and status."""


@contextmanager
def webhook() -> Iterator[tuple[list[Notification], str]]:
    """A webhook server of a pager and a ticket system while the block lasts: its notifications, in order, and its URL."""
    received: list[Notification] = []

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            alerts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["alerts"]
            received.extend((self.path, alert["labels"]["alertname"], alert["status"]) for alert in alerts)
            self.answer(200)

    with serving(Handler) as url:
        yield received, url


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


def test_alerts_reach_the_webhook_and_are_resolved_when_the_fault_is_healed(token_file: Path, tmp_path: Path) -> None:
    prometheus_folder = tmp_path / "prometheus"
    prometheus_folder.mkdir()
    admin_port = free_port()

    def wait_for(*notification: str) -> None:
        wait_until(lambda: notification in received)

    with (
        webhook() as (received, url),
        alertmanager(tmp_path / "alertmanager", url) as address,
        running_prometheus(
            prometheus_folder, f"http://127.0.0.1:{admin_port}/metrics", alertmanager=address, alert_for="0s"
        ) as prometheus,
    ):
        wait_for("/page", "LeaderDown", "firing")
        # No supervisor replaces a worker that is frozen.
        with (
            service_for_workers(token_file, replicas=2, admin_port=admin_port, heartbeat_timeout_s=3) as service,
            external_worker(service.join_address, name="first") as first,
            external_worker(service.join_address, name="second") as second,
        ):
            wait_for("/page", "LeaderDown", "resolved")
            prometheus.wait_for("multiworld_redundancy == 1")
            first.send_signal(signal.SIGSTOP)
            wait_for("/ticket", "ServiceDegraded", "firing")
            second.send_signal(signal.SIGSTOP)
            wait_for("/page", "StageDown", "firing")
            for worker in (first, second):
                worker.send_signal(signal.SIGCONT)
            wait_for("/page", "StageDown", "resolved")
            wait_for("/ticket", "ServiceDegraded", "resolved")
            assert "RequestsLost" not in {alert for _, alert, _ in received}
