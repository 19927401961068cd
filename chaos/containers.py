"""The containers of a Docker Compose project: which there are, whose workers they are, and what can be done to them from outside.

By the command `docker`, which knows where its engine is. Their processes are seen where the engine's processes are this machine's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import NOTHING, Access

HTTP_PORT = "8000/tcp"
"""Where a leader's container answers requests."""
_COMMAND_S = 180.0
_FREE_ADDRESSES = 16
_PLACEHOLDER_S = 600
"""After so long it goes by itself, should we not be there any more to take it away."""
_COMPOSE = "com.docker.compose"


class ContainerError(Exception):
    """Docker did not do as it was told, or what was looked for is not there."""


@dataclass(frozen=True, slots=True)
class Container:
    """One container as it was when it was looked at.

    Attributes:
        service: of the Compose file.
        hostname: begins the names of the workers in it, HOSTNAME-PID.
        pid: of its first process, on the engine's machine; 0 while it does not run.
        memory_bytes: its limit; 0 for none.
        networks: by name, the names by which others reach it there.
        addresses: by network.
        http: HOST:PORT at which its HTTP API is published; empty when it is not.
    """

    id: str
    image: str
    name: str
    service: str
    hostname: str
    pid: int
    memory_bytes: int
    networks: dict[str, tuple[str, ...]]
    addresses: dict[str, str]
    http: str

    def do(self, verb: str, *options: str) -> None:
        """`docker VERB OPTIONS` with this container. Raises ContainerError."""
        docker(verb, *options, self.id)

    def run(self, *command: str) -> None:
        """`docker exec`: a command within it. Raises ContainerError unless it ends well."""
        docker("exec", self.id, *command)

    def unplug(self) -> None:
        """Take it off all its networks."""
        for network in self.networks:
            docker("network", "disconnect", network, self.id)

    @contextlib.contextmanager
    def addresses_taken(self) -> Iterator[None]:
        """While the block runs, others have the addresses that it had, so that it gets new ones. To be called while it has none.

        Raises ContainerError.
        """
        with ExitStack() as stack:
            for network, address in self.addresses.items():
                for _ in range(_FREE_ADDRESSES):  # Docker gives the lowest that is free
                    command = ("run", "--detach", "--rm", "--network", network, "--entrypoint", "sleep")
                    other = docker(*command, self.image, str(_PLACEHOLDER_S)).strip()
                    stack.callback(docker, "rm", "--force", other)
                    (found,) = json.loads(docker("inspect", other))
                    if found["NetworkSettings"]["Networks"][network]["IPAddress"] == address:
                        break
            yield

    def plug(self) -> None:
        """Put it on its networks again, under its names there; its addresses may be others."""
        for network, aliases in self.networks.items():
            names = [part for alias in aliases for part in ("--alias", alias)]
            docker("network", "connect", *names, network, self.id)


class ComposeProject:
    """A service that runs as a Docker Compose project. Implements `chaos.target.Target`.

    Args:
        name: of the project, as `docker compose ls` shows it.
        environment: with which its file was brought up; this process's own if None.
        way_in: what the service wants to be shown.

    Raises:
        ContainerError: there is no Docker, no such project, or no leader in it that publishes its HTTP API.
    """

    def __init__(self, name: str, *, environment: Mapping[str, str] | None = None, way_in: Access = NOTHING) -> None:
        self.name = name
        self.way_in = way_in
        self._environment = environment
        self.url = f"http://{self.leader.http}"

    @property
    def pid(self) -> int | None:
        """The leader's process; None when it does not run, or is not to be seen from here."""
        return next(iter(_children(self.leader.pid)), None)

    @property
    def leader(self) -> Container:
        """The container that publishes the HTTP API, running or not."""
        found = self.containers()
        leader = next((each for each in found if each.http), None)
        if leader is None:
            raise ContainerError(f"project {self.name}: {len(found)} containers, and none publishes port {HTTP_PORT}")
        return leader

    def containers(self, service: str | None = None) -> list[Container]:
        """All of the project, or of one service, that are there now."""
        labels = {f"{_COMPOSE}.project": self.name, f"{_COMPOSE}.oneoff": "False"}
        if service is not None:
            labels[f"{_COMPOSE}.service"] = service
        filters = [part for label, value in labels.items() for part in ("--filter", f"label={label}={value}")]
        ids = docker("ps", "--all", "--quiet", "--no-trunc", *filters).split()
        return [_container(each) for each in json.loads(docker("inspect", *ids))] if ids else []

    def container(self, worker: str) -> Container:
        """The container in which this worker runs. Raises ContainerError."""
        hostname = worker.rpartition("-")[0]
        for each in self.containers():
            if each.hostname == hostname:
                return each
        raise ContainerError(f"project {self.name}: worker {worker} runs in none of its containers")

    def worker_pids(self) -> dict[str, int]:
        """See `Target.worker_pids`: of everything that a container's first process has started."""
        return {
            f"{container.hostname}-{inner}": pid
            for container in self.containers()
            for inner, pid in _inner_pids(container.pid)
        }

    def compose(self, *arguments: str) -> None:
        """`docker compose ARGUMENTS` with the files that the project was brought up from. Raises ContainerError."""
        labels = json.loads(docker("inspect", self.leader.id))[0]["Config"]["Labels"]
        files = labels.get(f"{_COMPOSE}.project.config_files", "").split(",")
        folder = labels.get(f"{_COMPOSE}.project.working_dir", ".")
        given = [part for file in files if file for part in ("--file", file)]
        options = ("--project-name", self.name, "--project-directory", folder, *given)
        docker("compose", *options, *arguments, environment=self._environment)

    def ran_out_of_memory(self, container: Container, since_s: float) -> bool:
        """Whether the kernel has ended a process in it for want of memory, from that time on."""
        filters = ("--filter", f"container={container.id}", "--filter", "event=oom")
        # An event is told a little after it happened: until one is there, or for certain there is none.
        deadline_s = time.monotonic() + 5.0
        while time.monotonic() < deadline_s:
            if docker("events", "--since", f"{since_s:.3f}", "--until", f"{time.time():.3f}", *filters).strip():
                return True
            time.sleep(0.2)
        return False


def docker(*arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = _COMMAND_S) -> str:
    """What one docker command writes to its standard output. Raises ContainerError when it fails, or takes too long."""
    command = ("docker", *arguments)
    try:
        done = subprocess.run(  # noqa: S603 - our own arguments
            command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ContainerError(f"{' '.join(command[:3])}: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise ContainerError(f"{' '.join(command)[:200]}: {said[0]}")
    return done.stdout


def why_no_docker() -> str:
    """Why containers cannot be hurt from here; empty when they can."""
    if not shutil.which("docker"):
        return "the program `docker` is not here"
    try:
        docker("version", "--format", "{{.Server.Version}}")
        docker("compose", "version")
    except ContainerError as error:
        return str(error)
    return ""


def _container(found: dict[str, Any]) -> Container:
    """What `docker inspect` says of one."""
    config, networks = found["Config"], found["NetworkSettings"]["Networks"] or {}
    return Container(
        id=found["Id"],
        image=found["Image"],
        name=found["Name"].removeprefix("/"),
        service=config["Labels"].get(f"{_COMPOSE}.service", ""),
        hostname=config["Hostname"],
        pid=found["State"]["Pid"],
        memory_bytes=found["HostConfig"]["Memory"],
        networks={name: _aliases(network, found["Id"]) for name, network in networks.items()},
        addresses={name: network["IPAddress"] for name, network in networks.items()},
        http=_published(found["NetworkSettings"]["Ports"] or found["HostConfig"]["PortBindings"] or {}),
    )


def _aliases(network: dict[str, Any], container_id: str) -> tuple[str, ...]:
    """Docker adds the short id by itself, and takes it amiss when it is asked for."""
    return tuple(alias for alias in network["Aliases"] or () if not container_id.startswith(alias))


def _published(bindings: dict[str, Any]) -> str:
    for binding in bindings.get(HTTP_PORT) or ():
        host = binding["HostIp"] or "127.0.0.1"
        return f"{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{binding['HostPort']}"  # noqa: S104 - translated
    return ""


def _children(pid: int) -> Iterator[int]:
    """The processes that a container's first process has started; itself when it has started none."""
    if not pid or _namespaced(pid)[1:] != [1]:
        return  # not there any more, or of another machine
    found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and _parent(path) == pid]
    yield from found or [pid]


def _inner_pids(pid: int) -> Iterator[tuple[int, int]]:
    """Number within the container and on this machine."""
    for child in _children(pid):
        if numbers := _namespaced(child)[1:]:
            yield numbers[-1], child


def _parent(folder: Path) -> int:
    return int((_status(folder, "PPid") or ["0"])[0])


def _namespaced(pid: int) -> list[int]:
    """The numbers of a process, from this machine's down to its own container's; empty when there is no such process."""
    return [int(number) for number in _status(Path(f"/proc/{pid}"), "NSpid")]


def _status(folder: Path, field: str) -> list[str]:
    try:
        text = (folder / "status").read_text()
    except OSError:  # ended just now
        return []
    found = re.search(rf"^{field}:\s*(.*)$", text, re.MULTILINE)
    return found[1].split() if found else []


def why_no_processes() -> str:
    """Why processes in containers cannot be hurt one by one; empty when they can."""
    if os.geteuid() != 0:
        return "the processes in containers are another user's: needs root"
    return "" if shutil.which("nsenter") else "the program `nsenter` (package util-linux) is not here"
