"""Small services for tests."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from multiworld_serving.common.config.sources import option
from multiworld_serving.testing.local_service import LocalService, LogLine, metric_sum
from tests.nursery import ForkedProcess, fork_program
from tests.waiting import wait_until

TOKEN = "a-secret-of-these-tests"


def small_service(**settings: Any) -> LocalService:
    """One stage with one replica of a ResNet-18 with random weights, for images of 32 x 32 pixels; `settings` change or add to that.

    Its workers start with little CPU time: they have one thread and do not optimize the model.

    All tensors travel over edges, although they are small. A process of a busy machine may stand still for seconds, and may need long to
    start again. Tests that freeze a process shorten the heartbeat timeout.
    """
    small = {
        "model": "resnet18",
        "weights": "random:0",
        "image_size": 32,
        "stages": 1,
        "replicas": 1,
        "threads": 1,
        "optimize": "eager",
        "edge_min_bytes": 0,
        "heartbeat_timeout_s": 10,
        "recovery_grace_s": 60,
        "timeout_s": 100,
    }
    return LocalService(**{**small, **settings})


def service_for_workers(token_file: Path, **settings: Any) -> LocalService:
    """The same without local workers: others join it with this token. The caller waits until it is ready."""
    return small_service(wait_until_ready=False, external_workers=True, token_file=token_file, **settings)


def is_whole(service: LocalService) -> bool:
    """Whether two frontends are ready, and the first of two leaders has four workers. A status shows what one of each knows."""
    with contextlib.suppress(httpx.HTTPError):  # a frontend that was frozen has been killed
        metrics = httpx.get(service.metrics_url, timeout=30.0).text
        ready = metric_sum(metrics, "multiworld_service_state", state="ready")
        leaders = [leader["state"] for leader in service.status()["leaders"]]
        return (ready, metric_sum(metrics, "multiworld_world_up"), leaders) == (2, 4, ["ready", "standby"])
    return False


def says(service: LocalService, text: str, after: int = 0) -> LogLine:
    """Wait for a line of the log with this text."""
    return service.wait_for(lambda line: text in line.message, 150.0, after=after)


@contextlib.contextmanager
def external_frontend(
    service: LocalService, name: str, folder: Path, **settings: object
) -> Iterator[tuple[str, ForkedProcess]]:
    """A frontend with a port of its own: its URL and its process."""
    log = folder / f"{name}.log"
    options = ["--leader", service.join_address, "--name", name, "--http-port", "0", "--admin-port", "0"]
    options += [part for setting, value in settings.items() for part in (option(setting), str(value))]
    with log.open("wb") as stderr:
        process = fork_program(
            ["frontend", *options], stderr.fileno(), MULTIWORLD_TOKEN=TOKEN, MULTIWORLD_HEARTBEAT_TIMEOUT_S="10"
        )
    try:
        wait_until(lambda: f"{name} serves http=" in log.read_text())
        address = log.read_text().split(f"{name} serves http=")[1].split()[0]
        yield f"http://{address}", process
    finally:
        process.kill()
        process.wait()
