"""The settings of `multiworld worker`: every field once, with its unit, bounds, default and sentence."""

import ipaddress
import os
import socket
from typing import ClassVar, Self

from pydantic import field_validator, model_validator

from config import DEVICE_PATTERN, Settings, setting
from config.addresses import Address, parse_address


def _default_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


class WorkerSettings(Settings):
    """What one worker process is told: whom to join, and on which device to compute."""

    section: ClassVar[str] = "worker"

    leader: str = setting(
        ...,
        "Network",
        "Where to join: HOST:PORT of a leader's join port; give it once for each leader, or with commas between.",
        allowed="HOST:PORT, such as 10.0.0.1:8001, each leader once",
        repeatable=True,
    )
    name: str = setting(
        None,
        "Network",
        "Name of this worker in logs, metrics and the status page; by default HOSTNAME-PID.",
        default_factory=_default_name,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$",
        allowed="1 to 128 letters, digits, dots, dashes or underscores, beginning with a letter or digit",
    )
    advertise_host: str = setting(
        None,
        "Network",
        "Host name or address that this worker is known by in the leader's log and status; by default the host's name.",
        default_factory=socket.gethostname,
        pattern=r"^[A-Za-z0-9:][A-Za-z0-9.:_-]{0,252}$",
        allowed="a host name or an address",
    )
    bind_host: str | None = setting(
        None,
        "Network",
        "Address of this machine that connections to leaders leave from, where it has several; none lets the kernel choose.",
        allowed="an address of this machine, such as 10.0.0.5",
    )
    metrics_host: str = setting("127.0.0.1", "Network", "Address that the metrics listen on; 0.0.0.0 for all.")
    metrics_port: int | None = setting(
        None,
        "Network",
        "Port of this worker's own Prometheus metrics, and of /healthz and /readyz for probes, such as 8003; 0 takes any free "
        "one, without it there are none.",
        ge=0,
        le=65535,
    )
    device: str = setting(
        "cpu", "Compute", "Device to compute on.", pattern=DEVICE_PATTERN, allowed="cpu, cuda or cuda:N"
    )
    threads: int = setting(0, "Compute", "Compute threads; 0 takes one for each core.", ge=0, le=1024)

    cores_file: str | None = setting(
        None,
        "Compute",
        "File by which the workers of one machine tell each other who computes; they share the cores then.",
        hidden=True,
    )
    cores_seat: int = setting(0, "Compute", "Number of this worker among those that share.", ge=0, hidden=True)
    cores_seats: int = setting(1, "Compute", "How many workers share.", ge=1, hidden=True)

    rejoin_backoff_s: float = setting(
        0.1,
        "Failure",
        "First pause before joining again when the leader is gone; doubles with each attempt.",
        gt=0,
        le=60,
    )
    rejoin_backoff_max_s: float = setting(5.0, "Failure", "Longest pause between two attempts to join.", gt=0, le=3600)
    exit_with_parent: bool = setting(
        False,
        "Process",
        "Exit when standard input ends: a supervisor holds its other end, so that no worker outlives it.",
        hidden=True,
    )

    @property
    def leaders(self) -> tuple[Address, ...]:
        """Where to join."""
        return _addresses(self.leader)

    @field_validator("leader")
    @classmethod
    def _leaders_have_host_and_port(cls, leader: str) -> str:
        _addresses(leader)
        return leader

    @field_validator("bind_host")
    @classmethod
    def _bind_host_is_an_address(cls, host: str | None) -> str | None:
        if host is not None:
            ipaddress.ip_address(host)
        return host

    @model_validator(mode="after")
    def _backoff_is_in_order(self) -> Self:
        if self.rejoin_backoff_max_s < self.rejoin_backoff_s:
            raise ValueError(
                f"rejoin_backoff_max_s ({self.rejoin_backoff_max_s:g}) must not be less than rejoin_backoff_s "
                f"({self.rejoin_backoff_s:g})"
            )
        return self


def _addresses(leaders: str) -> tuple[Address, ...]:
    """Split "host:port,host:port". Raises ValueError for what is no address, and for one that is there twice."""
    addresses = tuple(parse_address(part.strip()) for part in leaders.split(","))
    if len(set(addresses)) < len(addresses):
        raise ValueError("must name each leader once")
    return addresses
