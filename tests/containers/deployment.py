"""A small service from docker-compose.yml, shared by the container tests."""

import os
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from multiworld_serving.testing.chaos.campaign import choose_targets, inject
from multiworld_serving.testing.chaos.faults.fault import WAIT_S, FaultContext
from multiworld_serving.testing.chaos.journal import Injection
from multiworld_serving.testing.chaos.observer import Observer
from multiworld_serving.testing.load.clients import Load, run_load
from multiworld_serving.testing.load.images import photos
from multiworld_serving.testing.load.requests import ReferenceRequest, served_requests
from tests.containers.faults import FAULTS
from tests.containers.project import ComposeProject, ContainerError, docker
from tests.e2e.prometheus_server import PrometheusServer
from tests.programs import free_port
from tests.waiting import wait_for_more

ROOT = Path(__file__).parents[2]
CLIENTS = 4
HEARTBEAT_TIMEOUT_S = 8.0
"""Longer than processes wait for a processor while four others start on two cores, beside other tests."""
SETTINGS = {
    "MULTIWORLD_MODEL": "resnet18",
    "MULTIWORLD_WEIGHTS": "random:0",
    "MULTIWORLD_IMAGE_SIZE": "64",
    # A whole stage is away for as long as four processes need to import torch at once.
    "MULTIWORLD_RECOVERY_GRACE_S": "200",
    "MULTIWORLD_TIMEOUT_S": "210",
    "WORKER_MEMORY": "1280m",
    "MULTIWORLD_HEARTBEAT_TIMEOUT_S": str(HEARTBEAT_TIMEOUT_S),
    # No collector runs and nothing is sampled: the programs start only if the image has the packages for tracing.
    "MULTIWORLD_OTLP_ENDPOINT": "http://127.0.0.1:4318",
    "MULTIWORLD_TRACE_RATIO": "0",
}
"""Small enough for two cores."""
CLIENT_TIMEOUT_S = 220.0


class Deployment:
    """`docker compose up -d --wait` while its `with` block lasts.

    Args:
        folder: for the files that the project needs beside the repository's.
        image: image to run; None builds it.

    Attributes:
        project: set once it is up.
    """

    project: ComposeProject

    def __init__(self, folder: Path, image: str | None) -> None:
        self.name = f"multiworld-test-{os.getpid()}"
        self._image = image
        self._ports = {"API_PORT": free_port(hold=False), "PROMETHEUS_PORT": free_port(hold=False)}
        own = {name: value for name, value in os.environ.items() if not name.startswith(("MULTIWORLD_", "COMPOSE_"))}
        image_name = image or "multiworld-serving:test"
        self.environment = own | SETTINGS | {"IMAGE": image_name} | {n: str(p) for n, p in self._ports.items()}
        self._files = [ROOT / "docker-compose.yml", _changed_services(folder)]
        self._random = random.Random(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._ports['API_PORT']}"

    @property
    def prometheus(self) -> PrometheusServer:
        return PrometheusServer(f"http://127.0.0.1:{self._ports['PROMETHEUS_PORT']}")

    def __enter__(self) -> Self:
        if self._image is None:
            self.compose("build", "--quiet", "frontend")
        try:
            self.compose("up", "--detach", "--wait", "--wait-timeout", "400")
            self.project = ComposeProject(self.name, environment=self.environment, prometheus=self.prometheus)
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

    def down(self) -> None:
        """Remove the project as a user would who wants nothing left of it."""
        self.compose("down", "--volumes", "--timeout", "20")

    def remains(self) -> list[str]:
        """Existing containers, networks and volumes of this project."""
        label = f"label=com.docker.compose.project={self.name}"
        kinds = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
        return [line for kind in kinds for line in docker(*kind, "--quiet", "--filter", label).split()]

    def hurt(self, name: str) -> Injection:
        """Inject one fault under load, and wait until every slot is ready again. No request may be lost."""
        fault, requests = FAULTS[name], self.requests()
        with Observer(self.url) as observer:
            now = observer.wait(lambda now: now.complete, WAIT_S, "complete")
            targets = choose_targets(fault, now, self._random)
            with self.load(requests) as load:
                wait_for_more(load.samples, CLIENTS)
                made = inject(fault, FaultContext(self.project, observer, targets, HEARTBEAT_TIMEOUT_S, requests[0]))
                wait_for_more(load.samples, 2 * CLIENTS)
        print(made)
        assert not made.unexpected, made.unexpected
        assert not load.failed, load.failed[:3]
        assert made.duplicates == 0
        return made

    def await_complete(self) -> None:
        """Wait until every slot is ready."""
        with Observer(self.url) as observer:
            observer.wait(lambda now: now.complete, WAIT_S, "complete")

    def worker_addresses(self) -> set[str]:
        """The workers' addresses on the network shared with the leaders."""
        return {address for each in self.project.containers("worker") for address in each.addresses.values()}

    def leader_addresses(self) -> list[str]:
        """The leaders' addresses on all networks."""
        return [address for each in self.project.leaders for address in each.addresses.values()]

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
        + "".join(f"  {name}: {{ healthcheck: {{ retries: 60 }} }}\n" for name in ("leader-a", "leader-b", "frontend"))
    )
    return file
