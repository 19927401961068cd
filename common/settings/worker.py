"""Settings of `multiworld worker`: each field with its unit, bounds, default and description."""

import socket
from typing import ClassVar

from multiworld_serving.common.config.addresses import NAME_ALLOWED, NAME_PATTERN, default_name
from multiworld_serving.common.config.edges import EdgePortSettings
from multiworld_serving.common.config.leaders import LeadersSettings
from multiworld_serving.common.config.settings import DEVICE_PATTERN, INTERNAL, setting


class WorkerSettings(LeadersSettings, EdgePortSettings):
    """Settings of one worker process: which leaders to join, and the device to compute on."""

    section: ClassVar[str] = "worker"

    name: str = setting(None, "Network", default_factory=default_name, pattern=NAME_PATTERN, allowed=NAME_ALLOWED)
    """Name in logs, metrics and the status; by default HOSTNAME-PID."""
    advertise_host: str = setting(
        None,
        "Network",
        default_factory=socket.gethostname,
        pattern=r"^[A-Za-z0-9:][A-Za-z0-9.:_-]{0,252}$",
        allowed="a host name or an address",
    )
    """Host name or address of this worker, shown in the leader's log and status; by default the host name."""
    metrics_host: str = setting("127.0.0.1", "Network")
    """Address to serve metrics on; 0.0.0.0 for all interfaces."""
    metrics_port: int | None = setting(None, "Network", ge=0, le=65535)
    """Port of this worker's metrics, /healthz and /readyz, such as 8003; 0 selects a free one; by default none."""
    device: str = setting("cpu", "Compute", pattern=DEVICE_PATTERN, allowed="cpu, cuda or cuda:N")
    """Device to compute on."""
    threads: int = setting(0, "Compute", ge=0, le=1024)
    """Compute threads; 0 takes one per core."""

    allow: str | None = setting(None, "Compute", allowed="FILE.py:LIST or MODULE:LIST")
    """Pipeline in Python whose stages this worker may run; repeat the option, or separate with commas, for several."""

    bind_host: str | None = setting(None, INTERNAL)
    """Local address to connect to leaders from: that of the node in a Ray cluster."""
    slot: int = setting(0, INTERNAL, ge=0)
    """Number of this worker among the local ones of a service, which use the GPUs of the machine in turn."""
