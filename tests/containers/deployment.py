"""A small service from docker-compose.yml, shared by the container tests."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from multiworld_serving.testing.chaos.faults.fault import WAIT_S
from multiworld_serving.testing.chaos.observer import Observer
from multiworld_serving.testing.load.clients import Load, run_load
from multiworld_serving.testing.load.images import photos
from multiworld_serving.testing.load.requests import ReferenceRequest, served_requests
from multiworld_serving.testing.local_service import RunningService
from tests.containers.project import Container, ContainerError, docker, shell
from tests.e2e.prometheus_server import PrometheusServer
from tests.programs import free_port

ROOT = Path(__file__).parents[2]
CLIENTS = 4
LEADERS = ("leader-a", "leader-b")
LABELS = "com.docker.compose"
HEARTBEAT_TIMEOUT_S = 8.0
"""Longer than processes wait for a processor while four others start on two cores, beside other tests."""
SETTINGS = {
    "MULTIWORLD_MODEL": "resnet18",
    "MULTIWORLD_WEIGHTS": "random:0",
    "MULTIWORLD_IMAGE_SIZE": "64",
    # A whole stage is away for as long as four processes need to import torch at once.
    "MULTIWORLD_RECOVERY_GRACE_S": "200",
    "MULTIWORLD_TIMEOUT_S": "210",
    "MULTIWORLD_JOIN_TIMEOUT_S": "120",
    "WORKER_MEMORY": "1280m",
    "MULTIWORLD_HEARTBEAT_TIMEOUT_S": str(HEARTBEAT_TIMEOUT_S),
    # No collector runs and nothing is sampled: the programs start only if the image has the packages for tracing.
    "MULTIWORLD_OTLP_ENDPOINT": "http://127.0.0.1:4318/v1/traces",
    "MULTIWORLD_TRACE_RATIO": "0",
}
"""Small enough for two cores."""
CLIENT_TIMEOUT_S = 220.0


class Deployment(RunningService):
    """`docker compose up -d --wait` while its `with` block lasts.

    Args:
        folder: for the files that the project needs beside the repository's.
        image: image to run; None builds it.
    """

    def __init__(self, folder: Path, image: str | None) -> None:
        self.name = f"multiworld-test-{os.getpid()}"
        self._image = image
        self._ports = {"API_PORT": free_port(hold=False), "PROMETHEUS_PORT": free_port(hold=False)}
        own = {name: value for name, value in os.environ.items() if not name.startswith(("MULTIWORLD_", "COMPOSE_"))}
        image_name = image or "multiworld-serving:test"
        self.environment = own | SETTINGS | {"IMAGE": image_name} | {n: str(p) for n, p in self._ports.items()}
        self._files = [ROOT / "docker-compose.yml", _changed_services(folder)]
        self.prometheus = PrometheusServer(f"http://127.0.0.1:{self._ports['PROMETHEUS_PORT']}")
        super().__init__(f"http://127.0.0.1:{self._ports['API_PORT']}")

    def __enter__(self) -> Self:
        if self._image is None:
            self.compose("build", "--quiet", "frontend")
        try:
            self.compose("up", "--detach", "--wait", "--wait-timeout", "400")
        except BaseException:
            self._tell_logs()
            self.down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def compose(self, *arguments: str) -> str:
        """Run `docker compose ARGUMENTS` for this project and return its output."""
        files = [part for file in self._files for part in ("--file", str(file))]
        return docker(
            *("compose", "--project-name", self.name, "--project-directory", str(ROOT), *files, *arguments),
            environment=self.environment,
            timeout_s=900.0,
        )

    def shell(self, command: str) -> str:
        """Run a command of the documentation, in which the project has its default name, and return its output."""
        (frontend,) = self.containers("frontend")
        files = ":".join(map(str, self._files))
        environment = self.environment | {"COMPOSE_PROJECT_NAME": self.name, "COMPOSE_FILE": files}
        return shell(re.sub(r"\bmultiworld-(?=\w+-\d)", f"{self.name}-", command), frontend.id, environment)

    def complete(self) -> None:
        """Wait until every slot and every leader is ready."""
        with Observer(self.url) as observer:
            observer.wait(lambda now: now.complete, WAIT_S, "complete")

    def down(self) -> None:
        """Remove the project as a user would who wants nothing left of it."""
        self.compose("down", "--volumes", "--timeout", "20")

    def remains(self) -> list[str]:
        """Existing containers, networks and volumes of this project."""
        label = f"label={LABELS}.project={self.name}"
        kinds = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
        return [line for kind in kinds for line in docker(*kind, "--quiet", "--filter", label).split()]

    def containers(self, *services: str) -> list[Container]:
        """The containers of these services."""
        project = f"label={LABELS}.project={self.name}"
        filters = [("--filter", project, "--filter", f"label={LABELS}.service={service}") for service in services]
        ids = [each for given in filters for each in docker("ps", "--all", "--quiet", "--no-trunc", *given).split()]
        return [Container.parse(each) for each in json.loads(docker("inspect", *ids))]

    def container(self, worker: str) -> Container:
        """The container of this worker, whose name is HOSTNAME-PID."""
        return next(each for each in self.containers("worker") if each.hostname == worker.rpartition("-")[0])

    def addresses(self, *services: str) -> list[str]:
        """The addresses of the containers of these services, on all networks."""
        return [address for each in self.containers(*services) for address in each.addresses.values()]

    def requests(self) -> list[ReferenceRequest]:
        """Images, and the service's current answers for them."""
        return served_requests(self.url, photos(4))

    @contextmanager
    def load(self, requests: Sequence[ReferenceRequest]) -> Iterator[Load]:
        """Clients at the published port while the block runs."""
        with run_load(self.url, requests, clients=CLIENTS, timeout_s=CLIENT_TIMEOUT_S) as load:
            yield load

    def _tell_logs(self) -> None:
        try:
            print(self.compose("ps", "--all"), self.compose("logs", "--no-color", "--tail", "40"))
        except ContainerError as error:
            print(error)


def _changed_services(folder: Path) -> Path:
    """A Compose file in which Prometheus scrapes more often, because tests wait for its data.

    More health checks may fail in a row, because `up --wait` ends when a container is unhealthy.
    """
    deployed = ROOT / "deploy" / "prometheus"
    text = (deployed / "prometheus.compose.yml").read_text()
    config = folder / "prometheus.compose.yml"
    config.write_text(re.sub(r"(interval): \d+s", r"\1: 2s", text))
    config.chmod(0o644)
    folder.chmod(0o755)
    file = folder / "compose.yml"
    file.write_text(
        f"services:\n  prometheus:\n    volumes:\n      - {config}:/etc/prometheus/prometheus.compose.yml:ro\n"
        + "".join(f"  {name}: {{ healthcheck: {{ retries: 60 }} }}\n" for name in (*LEADERS, "frontend", "worker"))
    )
    return file
