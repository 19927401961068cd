"""A Prometheus server that scrapes one leader with the deployed configuration at shorter intervals."""

import contextlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.programs import free_port, process, program
from tests.waiting import wait_until

DEPLOYED = Path(__file__).parents[2] / "deploy" / "prometheus"


@dataclass(frozen=True)
class PrometheusServer:
    """Attributes:
    url: the base URL of its API.
    """

    url: str

    def query_range(self, expr: str, start_s: float, end_s: float, step_s: float = 1.0) -> list[dict[str, Any]]:
        """All series of an expression in this time range. Raises AssertionError if Prometheus rejects it."""
        found = self._ask("query_range", query=expr, start=start_s, end=end_s, step=step_s)
        series: list[dict[str, Any]] = found["result"]
        return series

    def query(self, expr: str) -> list[dict[str, Any]]:
        """All current series of an expression."""
        series: list[dict[str, Any]] = self._ask("query", query=expr)["result"]
        return series

    def wait_for(self, expr: str) -> None:
        """Wait until an expression has a series."""
        wait_until(lambda: self.query(expr))

    def _ask(self, what: str, **parameters: object) -> dict[str, Any]:
        body = httpx.post(f"{self.url}/api/v1/{what}", data=parameters, timeout=60.0).json()
        assert body["status"] == "success", f"{parameters}: {body.get('error')}"
        data: dict[str, Any] = body["data"]
        return data


@contextlib.contextmanager
def running_prometheus(
    folder: Path,
    metrics_url: str,
    *,
    worker_url: str = "",
    alertmanager: str = "",
    alert_for: str | None = None,
) -> Iterator[PrometheusServer]:
    """Run one while the block lasts; it evaluates and scrapes every second.

    Args:
        folder: for its configuration and data.
        worker_url: metrics of a worker; none by default.
        alertmanager: HOST:PORT; none by default.
        alert_for: replaces the `for` duration of every alert; then a deployment has one second to start.
    """
    binary = program("prometheus")
    shutil.copytree(DEPLOYED / "rules", folder / "rules")
    if alert_for is not None:
        alerts = folder / "rules" / "alerts.yml"
        alerts.write_text(
            re.sub(r"\bfor: \w+", f"for: {alert_for}", alerts.read_text().replace("offset 5m", "offset 1s"))
        )
    config = (DEPLOYED / "prometheus.yml").read_text()
    config = config.replace("127.0.0.1:8003", urlsplit(worker_url).netloc or "127.0.0.1:9")
    config = config.replace("127.0.0.1:8002", urlsplit(metrics_url).netloc)
    config = config.replace("127.0.0.1:9093", alertmanager or "127.0.0.1:9")
    (folder / "prometheus.yml").write_text(re.sub(r"_interval: 5s", "_interval: 1s", config))
    address = f"127.0.0.1:{free_port()}"
    with (
        (folder / "prometheus.log").open("w") as log,
        process(
            binary,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
            log=log,
        ),
    ):
        wait_until_answers(f"http://{address}/-/ready")
        yield PrometheusServer(f"http://{address}")


def wait_until_answers(url: str) -> None:
    """Wait for a 200."""

    def answers() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(url).status_code == 200
        return False

    wait_until(answers)
