"""The leaders and workers of one model on this machine: their sockets, settings and supervisors, and the autoscaler of the workers."""

import contextlib
import logging
import socket
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from ipaddress import ip_address

from multiworld_serving.common.config.sources import option
from multiworld_serving.common.http.listener import bind
from multiworld_serving.common.settings.serve import ServeSettings
from multiworld_serving.server.supervisor.programs import (
    Process,
    Role,
    Starter,
    Values,
    compute_threads,
    leader_values,
    timeouts_s,
    worker_values,
)
from multiworld_serving.server.supervisor.scaling.autoscaler import Autoscaler
from multiworld_serving.server.supervisor.scaling.policy import Limits, ScalingPolicy
from multiworld_serving.server.supervisor.supervisor import ProcessSet

logger = logging.getLogger(__name__)

_NAMES: dict[Role, str] = {"worker": "local", "leader": "leader"}
"""First part of the names of the processes."""


class Group(ProcessSet):
    """The leaders and workers of one model.

    Args:
        prefix: first part of the names of its processes.
        workers: number of workers of all models, which share the cores.
        is_new: whether the model is added to others that serve. It must fit into the memory that these leave, until it is ready.
        first_slot: number of workers of models before it; for a new model, of all others. Workers use the GPUs in turn.
        stack: closes the sockets.
    """

    def __init__(
        self,
        settings: ServeSettings,
        starter: Starter,
        stack: contextlib.ExitStack,
        *,
        prefix: str = "",
        workers: int,
        is_new: bool = False,
        first_slot: int = 0,
    ) -> None:
        self.settings = settings
        self.is_new = is_new
        self._first_slot = workers - settings.max_workers if is_new else first_slot
        self.threads = compute_threads(settings, workers)
        self._notify = starter.notify
        self._prefix = prefix
        self.joins = [
            stack.enter_context(
                bind(settings.join_host, settings.join_port_of(index), option("join_port"), option("join_host"))
            )
            for index in range(settings.leaders)
        ]
        counts: dict[Role, int] = {
            "worker": 0 if settings.external_workers else settings.num_workers,
            "leader": settings.leaders,
        }
        processes = {"worker": self._worker, "leader": self._leader}
        super().__init__(
            {
                role: starter.supervisor(role, count, processes[role], timeouts_s(settings, role), prefix)
                for role, count in counts.items()
            }
        )

    def others(self) -> Iterable[AbstractAsyncContextManager[object]]:
        """The autoscaler."""
        if (limits := self.settings.worker_limits) is not None:
            policy = ScalingPolicy(Limits(*limits, self.settings.replicas, self.settings.spares))
            workers, leaders = self.supervisors["worker"], self.supervisors["leader"]
            yield Autoscaler(workers, leaders, self._notify, self._name("worker", ""), policy)

    @property
    def is_reachable(self) -> bool:
        """Whether workers of other machines may join its leaders."""
        return self.settings.external_workers or not ip_address(self.joins[0].getsockname()[0]).is_loopback

    @property
    def leaders(self) -> str:
        """The addresses of its leaders for processes of this machine."""
        host = local_host_of(self.settings.join_host)
        return ",".join(f"{host}:{sock.getsockname()[1]}" for sock in self.joins)

    def log_external(self, name: str) -> None:
        """Log how workers join the model `name`, if they run on other machines."""
        settings, there = self.settings, external_host_of(self.settings.join_host)
        if settings.external_workers:
            ports = [sock.getsockname()[1] for sock in self.joins]
            each = " ".join(f"--leader {settings.advertised(port) or f'{there}:{port}'}" for port in ports)
            logger.info(
                "waiting for workers of %s; on each of their machines: multiworld worker %s --token-file …", name, each
            )

    def _leader(self, slot: int) -> Process:
        name, settings = self._name("leader", slot), self.settings
        fds = {"join_fd": self.joins[slot].fileno()}
        checks = self.is_new and settings.device == "cpu" and not settings.external_workers
        return Process(name, {**leader_values(settings, slot), "name": name, "local_memory": checks, **fds}, fds)

    def _worker(self, slot: int) -> Process:
        name, settings = self._name("worker", slot), self.settings
        own: Values = {
            "leader": self.leaders,
            "name": name,
            "threads": self.threads,
            "slot": self._first_slot + slot,
        }
        return Process(name, {**worker_values(settings), **own}, {}, self.threads)

    def _name(self, role: Role, slot: object) -> str:
        return f"{self._prefix}{_NAMES[role]}-{slot}"


def local_host_of(host: str) -> str:
    """The address at which this machine's own processes reach a listener on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - translated, not bound
    return f"[{reachable}]" if ":" in reachable else reachable


def external_host_of(host: str) -> str:
    """The name by which other machines reach a listener on `host`."""
    name = socket.gethostname() if host in {"0.0.0.0", "::"} else host  # noqa: S104 - translated, not bound
    return f"[{name}]" if ":" in name else name
