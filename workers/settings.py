"""Settings of `multiworld worker`: each field with its unit, bounds, default and description."""

import ipaddress
import socket
from typing import ClassVar, Self

from pydantic import field_validator, model_validator

from multiworld_serving.common.config import DEVICE_PATTERN, setting
from multiworld_serving.common.config.addresses import (
    NAME_ALLOWED,
    NAME_PATTERN,
    default_name,
)
from multiworld_serving.common.config.edges import EdgePortSettings
from multiworld_serving.common.config.leaders import LeadersSettings


class WorkerSettings(LeadersSettings, EdgePortSettings):
    """Settings of one worker process: which leaders to join, and the device to compute on."""

    section: ClassVar[str] = "worker"

    name: str = setting(
        None,
        "Network",
        "Name of this worker in logs, metrics and the status page; by default HOSTNAME-PID.",
        default_factory=default_name,
        pattern=NAME_PATTERN,
        allowed=NAME_ALLOWED,
    )
    advertise_host: str = setting(
        None,
        "Network",
        "Host name or address of this worker, shown in the leader's log and status; by default the host name.",
        default_factory=socket.gethostname,
        pattern=r"^[A-Za-z0-9:][A-Za-z0-9.:_-]{0,252}$",
        allowed="a host name or an address",
    )
    bind_host: str | None = setting(
        None,
        "Network",
        "Local address to connect to leaders from; by default the kernel chooses.",
        allowed="an address of this machine, such as 10.0.0.5",
    )
    metrics_host: str = setting("127.0.0.1", "Network", "Address to serve metrics on; 0.0.0.0 for all interfaces.")
    metrics_port: int | None = setting(
        None,
        "Network",
        "Port of this worker's Prometheus metrics and of /healthz and /readyz, such as 8003; 0 takes any free port; by default "
        "there are none.",
        ge=0,
        le=65535,
    )
    device: str = setting(
        "cpu", "Compute", "Device to compute on.", pattern=DEVICE_PATTERN, allowed="cpu, cuda or cuda:N"
    )
    threads: int = setting(0, "Compute", "Compute threads; 0 takes one per core.", ge=0, le=1024)

    cores_file: str | None = setting(
        None,
        "Compute",
        "Lock file by which the workers of one machine share its cores.",
        hidden=True,
    )
    cores_index: int = setting(
        0, "Compute", "Index of this worker among those that share the cores.", ge=0, hidden=True
    )
    cores_workers: int = setting(1, "Compute", "Number of workers that share the cores.", ge=1, hidden=True)

    rejoin_backoff_s: float = setting(
        0.1,
        "Failure",
        "First pause before rejoining after the leader is lost; doubles with each attempt.",
        gt=0,
        le=60,
    )
    rejoin_backoff_max_s: float = setting(5.0, "Failure", "Longest pause between attempts to join.", gt=0, le=3600)
    exit_with_parent: bool = setting(
        False,
        "Process",
        "Exit at end of file on standard input; the supervisor holds the other end, so no worker outlives it.",
        hidden=True,
    )

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
