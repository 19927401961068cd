"""The leaders and workers of one model on this machine: their sockets, settings and supervisors, and the autoscaler of the workers."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from ipaddress import ip_address
from typing import Protocol

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.sources import option
from multiworld_serving.common.http.listener import bind
from multiworld_serving.deploy.processes.child_process import ChildProcess
from multiworld_serving.deploy.processes.notify import NotifyListener
from multiworld_serving.deploy.processes.programs import (
    WORKER_BLOCKED_S,
    Role,
    Values,
    blocked_timeout_s,
    compute_threads,
    leader_values,
    stop_timeout_s,
    worker_values,
)
from multiworld_serving.deploy.processes.supervisor import ProcessSet, Supervisor
from multiworld_serving.deploy.scaling.autoscaler import REPORT_AGE_S, Autoscaler, limits_of
from multiworld_serving.deploy.scaling.policy import ScalingPolicy
from multiworld_serving.server.capacity_report import CapacityReport
from multiworld_serving.server.settings import ServeSettings

NAMES: dict[Role, str] = {"worker": "local", "leader": "leader", "frontend": "frontend"}
"""First part of the names of the processes, in the order in which they start."""
_WORKER_STOP_S = 10.0
"""From SIGTERM to SIGKILL of a worker."""
_COUNT_CUDA_DEVICES = "import torch; print(torch.cuda.device_count())"


class Service(Protocol):
    """What the processes of a group share with the others of the service."""

    notify: NotifyListener

    def start(self, role: Role, name: str, values: Values, fds: Mapping[str, int], threads: int) -> ChildProcess:
        """Start a process with these settings and descriptors. Raises OSError."""

    def write_restarts(self) -> None:
        """The number of restarts of a process has changed."""


class Group(ProcessSet):
    """The leaders and workers of one model.

    Args:
        prefix: first part of the names of its processes.
        workers: number of workers of all models, which share the cores.
        cores: a file, and the position of this group's first worker in it; see `SharedCores`.
        is_new: whether it must fit into the memory that other models leave.
        stack: closes the sockets.
    """

    def __init__(
        self,
        settings: ServeSettings,
        service: Service,
        stack: contextlib.ExitStack,
        *,
        prefix: str = "",
        workers: int,
        cores: tuple[str, int],
        is_new: bool = False,
    ) -> None:
        self.settings = settings
        self._is_new = is_new
        self.threads = compute_threads(settings, workers)
        self._service = service
        self._prefix = prefix
        self._workers = workers
        self._cores = cores
        self._devices = _devices(settings)
        self.joins = [
            stack.enter_context(bind(settings.join_host, settings.join_port_of(index), option("join_port")))
            for index in range(settings.leaders)
        ]
        local_workers = 0 if settings.external_workers else settings.num_workers
        leader_s = stop_timeout_s(settings), blocked_timeout_s(settings)
        super().__init__(
            {
                "worker": self._supervisor("worker", local_workers, _WORKER_STOP_S, WORKER_BLOCKED_S),
                "leader": self._supervisor("leader", settings.leaders, *leader_s),
            }
        )

    def _supervisor(self, role: Role, count: int, stop_s: float, blocked_s: float) -> Supervisor:
        return Supervisor(
            lambda slot: self._service.start(role, *self.process(role, slot)),
            count,
            kind=f"{self._prefix}{role}",
            stop_timeout_s=stop_s,
            notify=self._service.notify,
            blocked_timeout_s=blocked_s,
            on_restart=self._service.write_restarts,
        )

    def others(self) -> Iterable[AbstractAsyncContextManager[object]]:
        """The autoscaler."""
        limits = limits_of(self.settings)
        return () if limits is None else (Autoscaler(self, ScalingPolicy(limits)),)

    @property
    def is_reachable(self) -> bool:
        """Whether workers of other machines may join its leaders."""
        return self.settings.external_workers or not ip_address(self.joins[0].getsockname()[0]).is_loopback

    @property
    def leaders(self) -> str:
        """The addresses of its leaders for processes of this machine."""
        host = local_host_of(self.settings.join_host)
        return ",".join(f"{host}:{sock.getsockname()[1]}" for sock in self.joins)

    def process(self, role: Role, slot: int) -> tuple[str, Values, Mapping[str, int], int]:
        """Name, settings, descriptors and threads of a process."""
        name, settings = self._name(role, slot), self.settings
        if role == "leader":
            fds = {"join_fd": self.joins[slot].fileno()}
            checks = self._is_new and settings.device == "cpu" and not settings.external_workers
            return name, {**leader_values(settings, slot), "name": name, "local_memory": checks, **fds}, fds, 1
        own: Values = {
            "leader": self.leaders,
            "name": name,
            "threads": self.threads,
            "device": self._devices[slot % len(self._devices)],
        }
        if not settings.threads and settings.device == "cpu":  # the workers share the cores
            file, first = self._cores
            count = max(self._workers, first + slot + 1)
            own |= {"cores_file": file, "cores_index": first + slot, "cores_workers": count}
        return name, {**worker_values(settings), **own}, {}, self.threads

    def _name(self, role: Role, slot: int) -> str:
        return f"{self._prefix}{NAMES[role]}-{slot}"

    # -- Launcher --------------------------------------------------------------------------------------------------------------

    async def capacity_reports(self) -> Sequence[CapacityReport | None]:
        """See `Launcher`."""
        leaders = self.supervisors["leader"]
        pids = [leaders.pids.get(slot) for slot in leaders.restarts]
        return [None if pid is None else self._service.notify.capacity(pid, REPORT_AGE_S) for pid in pids]

    async def workers(self) -> set[str]:
        """See `Launcher`."""
        return {self._name("worker", slot) for slot in self.supervisors["worker"].restarts}

    async def scale_workers(self, count: int) -> None:
        """See `Launcher`."""
        workers = self.supervisors["worker"]
        for _ in range(count - len(workers.restarts)):
            workers.add()

    async def stop_worker(self, name: str) -> None:
        """See `Launcher`."""
        await self.supervisors["worker"].remove(int(name.removeprefix(self._name("worker", 0)[:-1])))


def _devices(settings: ServeSettings) -> list[str]:
    """Return the devices of local workers, in turn: "cuda" without an index means the GPUs of this machine. Raises UserError."""
    if settings.device == "cpu" or settings.external_workers:
        return [settings.device]
    try:
        command = [sys.executable, "-c", _COUNT_CUDA_DEVICES]
        count = int(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)  # noqa: S603
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise UserError(f"--device {settings.device}: cannot count the GPUs of this machine: {error}") from error
    devices = [f"cuda:{index}" for index in range(count)]
    if settings.device not in ("cuda", *devices) or not devices:
        raise UserError(
            f"device {settings.device!r} does not exist: this machine has {', '.join(devices) or 'no CUDA device'}; "
            f"use --device cpu or another index"
        )
    return devices if settings.device == "cuda" else [settings.device]


def local_host_of(host: str) -> str:
    """The address at which this machine's own processes reach a listener on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - translated, not bound
    return f"[{reachable}]" if ":" in reachable else reachable


def external_host_of(host: str) -> str:
    """The name by which other machines reach a listener on `host`."""
    name = socket.gethostname() if host in {"0.0.0.0", "::"} else host  # noqa: S104 - translated, not bound
    return f"[{name}]" if ":" in name else name
