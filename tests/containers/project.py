"""Access to containers, with the command `docker`."""

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

_COMMAND_S = 180.0
_PROCEDURE_S = 600.0
"""For commands that replace all workers."""
_FREE_ADDRESSES = 16
_PLACEHOLDER_S = 600
"""A placeholder container ends by itself after this time, in case this process is killed."""


class ContainerError(Exception):
    """A docker command failed, or the container does not exist."""


@dataclass(frozen=True, slots=True)
class Container:
    """One container at the time of `docker inspect`.

    Attributes:
        hostname: prefix of the names of its workers, HOSTNAME-PID.
        networks: its aliases by network.
        addresses: its IP address by network.
    """

    id: str
    image: str
    hostname: str
    networks: dict[str, tuple[str, ...]]
    addresses: dict[str, str]

    @classmethod
    def parse(cls, found: dict[str, Any]) -> Self:
        """Parse an entry of `docker inspect`."""
        networks = found["NetworkSettings"]["Networks"] or {}
        return cls(
            id=found["Id"],
            image=found["Image"],
            hostname=found["Config"]["Hostname"],
            # Without the short container id: Docker adds it itself and rejects it as an option.
            networks={
                name: tuple(alias for alias in network["Aliases"] or () if not found["Id"].startswith(alias))
                for name, network in networks.items()
            },
            addresses={name: network["IPAddress"] for name, network in networks.items()},
        )

    @contextlib.contextmanager
    def killed(self) -> Iterator[None]:
        """Kill the container, and start it after the block: Docker does not restart a container after `docker kill`."""
        docker("kill", self.id)
        try:
            yield
        finally:
            docker("start", self.id)

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


def docker(*arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = _COMMAND_S) -> str:
    """Run one docker command and return its standard output. Raises ContainerError if it fails or times out."""
    return run(("docker", *arguments), environment, timeout_s)


def run(command: Sequence[str], environment: Mapping[str, str] | None, timeout_s: float) -> str:
    """Run a command and return its standard output. Raises ContainerError if it fails or times out."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ContainerError(f"{' '.join(command[:3])}: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise ContainerError(f"{' '.join(command)[:200]}: {said[0]}")
    return done.stdout


def shell(command: str, frontend: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a line of shell in the repository, in which `multiworld` runs in the container of this frontend. Raises ContainerError."""
    program = f'multiworld() {{ docker exec {frontend} multiworld "$@"; }}; {command}'
    return run(("bash", "-euo", "pipefail", "-c", program), environment, _PROCEDURE_S)
