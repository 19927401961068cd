"""Access to the containers of a Docker Compose project, with the command `docker`."""

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from multiworld_serving.testing.local_service import RunningService
from tests.e2e.prometheus_server import PrometheusServer

HTTP_PORT = "8000/tcp"
"""Port of the HTTP API in the container of a frontend."""
_COMMAND_S = 180.0
_FREE_ADDRESSES = 16
_PLACEHOLDER_S = 600
"""A placeholder container ends by itself after this time, in case this process is killed."""
_COMPOSE = "com.docker.compose"


class ContainerError(Exception):
    """A docker command failed, or the container does not exist."""


@dataclass(frozen=True, slots=True)
class Container:
    """One container at the time of `docker inspect`.

    Attributes:
        service: name in the Compose file.
        program: first argument of `multiworld`, such as "leader" or "worker"; empty if there is none.
        hostname: prefix of the names of its workers, HOSTNAME-PID.
        networks: its aliases by network.
        addresses: its IP address by network.
        http: HOST:PORT at which its HTTP API is published; empty if it is not.
    """

    id: str
    image: str
    name: str
    service: str
    program: str
    hostname: str
    networks: dict[str, tuple[str, ...]]
    addresses: dict[str, str]
    http: str

    @contextlib.contextmanager
    def down(self, command: str, undo: str) -> Iterator[None]:
        """Run one command of Docker with the container before the block and one after it, such as `kill` and `start`."""
        docker(command, self.id)
        try:
            yield
        finally:
            docker(undo, self.id)

    def killed(self) -> AbstractContextManager[None]:
        """Kill the container, and start it after the block: Docker does not restart a container after `docker kill`."""
        return self.down("kill", "start")

    def paused(self) -> AbstractContextManager[None]:
        """Pause all processes of the container while the block runs."""
        return self.down("pause", "unpause")

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        """Disconnect the container from all its networks while the block runs; its addresses change."""
        for network in self.networks:
            docker("network", "disconnect", network, self.id)
        try:
            yield
        finally:
            with self._addresses_reserved():
                self._connect_networks()

    @contextlib.contextmanager
    def _addresses_reserved(self) -> Iterator[None]:
        """Occupy its previous addresses while the block runs, so that it gets new ones. Call while it is disconnected.

        Raises ContainerError.
        """
        with ExitStack() as stack:
            for network, address in self.addresses.items():
                for _ in range(_FREE_ADDRESSES):  # Docker assigns the lowest free address
                    command = ("run", "--detach", "--rm", "--network", network, "--entrypoint", "sleep")
                    other = docker(*command, self.image, str(_PLACEHOLDER_S)).strip()
                    stack.callback(docker, "rm", "--force", other)
                    (found,) = json.loads(docker("inspect", other))
                    if found["NetworkSettings"]["Networks"][network]["IPAddress"] == address:
                        break
            yield

    def _connect_networks(self) -> None:
        """Reconnect the container to its networks with its aliases; its addresses may change."""
        for network, aliases in self.networks.items():
            names = [part for alias in aliases for part in ("--alias", alias)]
            docker("network", "connect", *names, network, self.id)


class ComposeProject(RunningService):
    """A service that runs as a Docker Compose project.

    Args:
        name: name of the project, as in `docker compose ls`.
        environment: environment of `docker compose`.
        prometheus: the Prometheus of the project.

    Raises:
        ContainerError: Docker or the project does not exist, or no container publishes the HTTP API.
    """

    def __init__(self, name: str, *, environment: Mapping[str, str], prometheus: PrometheusServer) -> None:
        self.name, self.prometheus = name, prometheus
        self._environment = environment
        super().__init__(f"http://{self.frontend.http}")

    @property
    def leaders(self) -> list[Container]:
        """The containers of the leaders, running or not, by name. A container of `multiworld serve` is a leader too."""
        found = [each for each in self.containers() if each.program in ("leader", "serve")]
        return sorted(found, key=lambda container: container.name)

    @property
    def frontend(self) -> Container:
        """A container that publishes the HTTP API, running or not."""
        found = self.containers()
        frontend = next((each for each in found if each.http), None)
        if frontend is None:
            raise ContainerError(
                f"project {self.name}: {len(found)} containers, none of which publishes port {HTTP_PORT}"
            )
        return frontend

    def containers(self, service: str | None = None) -> list[Container]:
        """Return all containers of the project, or of one service."""
        labels = {f"{_COMPOSE}.project": self.name, f"{_COMPOSE}.oneoff": "False"}
        if service is not None:
            labels[f"{_COMPOSE}.service"] = service
        filters = [part for label, value in labels.items() for part in ("--filter", f"label={label}={value}")]
        ids = docker("ps", "--all", "--quiet", "--no-trunc", *filters).split()
        return [_container(each) for each in json.loads(docker("inspect", *ids))] if ids else []

    def container(self, worker: str) -> Container:
        """Return the container of this worker. Raises ContainerError."""
        hostname = worker.rpartition("-")[0]
        for each in self.containers():
            if each.hostname == hostname:
                return each
        raise ContainerError(f"project {self.name}: worker {worker} runs in none of its containers")

    def compose(self, *arguments: str) -> None:
        """Run `docker compose ARGUMENTS` with the Compose files of the project. Raises ContainerError."""
        labels = json.loads(docker("inspect", self.frontend.id))[0]["Config"]["Labels"]
        files = labels.get(f"{_COMPOSE}.project.config_files", "").split(",")
        folder = labels.get(f"{_COMPOSE}.project.working_dir", ".")
        given = [part for file in files if file for part in ("--file", file)]
        options = ("--project-name", self.name, "--project-directory", folder, *given)
        docker("compose", *options, *arguments, environment=self._environment)


def docker(*arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = _COMMAND_S) -> str:
    """Run one docker command and return its standard output. Raises ContainerError if it fails or times out."""
    command = ("docker", *arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ContainerError(f"{' '.join(command[:3])}: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise ContainerError(f"{' '.join(command)[:200]}: {said[0]}")
    return done.stdout


def docker_unavailable_reason() -> str:
    """Return why Docker cannot be used; empty if it can."""
    if not shutil.which("docker"):
        return "the program `docker` is not installed"
    try:
        docker("version", "--format", "{{.Server.Version}}")
        docker("compose", "version")
    except ContainerError as error:
        return str(error)
    return ""


def _container(found: dict[str, Any]) -> Container:
    """Parse an entry of `docker inspect`."""
    config, networks = found["Config"], found["NetworkSettings"]["Networks"] or {}
    return Container(
        id=found["Id"],
        image=found["Image"],
        name=found["Name"].removeprefix("/"),
        service=config["Labels"].get(f"{_COMPOSE}.service", ""),
        program=next(iter(config.get("Cmd") or ()), ""),
        hostname=config["Hostname"],
        networks={name: _aliases(network, found["Id"]) for name, network in networks.items()},
        addresses={name: network["IPAddress"] for name, network in networks.items()},
        http=_published(found["NetworkSettings"]["Ports"] or found["HostConfig"]["PortBindings"] or {}),
    )


def _aliases(network: dict[str, Any], container_id: str) -> tuple[str, ...]:
    """Return the aliases without the short container id: Docker adds it itself and rejects it as an option."""
    return tuple(alias for alias in network["Aliases"] or () if not container_id.startswith(alias))


def _published(bindings: dict[str, Any]) -> str:
    for binding in bindings.get(HTTP_PORT) or ():
        host = binding["HostIp"] or "127.0.0.1"
        return f"{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{binding['HostPort']}"
    return ""
