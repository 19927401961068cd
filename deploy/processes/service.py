"""`multiworld serve`: starts leaders, frontends and local workers, restarts those that end, and stops them in order.

This process imports no torch and carries no request. It opens all listening sockets and passes them on, so a restarted process continues
on the same port, and clients that connect meanwhile wait instead of being refused.
"""

import asyncio
import contextlib
import fcntl
import functools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from multiworld_serving.common.config import UserError, raise_descriptor_limit
from multiworld_serving.common.config.keys import read_keys
from multiworld_serving.common.config.process import notify_systemd, on_stop_signal
from multiworld_serving.common.config.sources import option
from multiworld_serving.common.config.tokens import new_token
from multiworld_serving.common.http.listener import bind
from multiworld_serving.common.metrics.families import Counter, Families
from multiworld_serving.deploy.processes.banner import banner
from multiworld_serving.deploy.processes.environment import (
    PROGRAM,
    child_fork_server,
    compute_threads,
    program_environment,
    worker_environment,
)
from multiworld_serving.deploy.processes.fork_server import ForkServer
from multiworld_serving.deploy.processes.launcher import Launched, Role
from multiworld_serving.deploy.processes.notify import NotifyListener
from multiworld_serving.deploy.processes.programs import (
    Values,
    blocked_timeout_s,
    frontend_values,
    leader_values,
    memory_file,
    settings_file,
    stop_timeout_s,
    worker_blocked_timeout_s,
    worker_values,
)
from multiworld_serving.deploy.processes.supervisor import INVALID_INPUT, Supervisor
from multiworld_serving.deploy.scaling.autoscaler import REPORT_AGE_S, Autoscaler, limits_of
from multiworld_serving.deploy.scaling.policy import ScalingPolicy
from multiworld_serving.server.capacity_report import CapacityReport
from multiworld_serving.server.http.tls import server_context
from multiworld_serving.server.settings import ServeSettings
from multiworld_serving.server.versions.model_files import check_model_files

logger = logging.getLogger(__name__)

_FIRST_FD = 200
"""Inherited descriptors have numbers from here on, which no child has in use."""
_WORKER_NAME = "local"
"""First part of the names of local workers."""
_COUNT_CUDA_DEVICES = "import torch; print(torch.cuda.device_count())"


def run(settings: ServeSettings) -> int:
    """Run the service until SIGTERM or Ctrl-C. Returns the exit status.

    Raises:
        UserError, models.ModelError: a port is in use, a file is missing, or the device does not exist. No process was started.
    """
    _check_files(settings)
    raise_descriptor_limit()
    settings = settings.model_copy(update={"local_token": new_token()})
    settings.accepted_secrets  # noqa: B018 - raises if the token file is invalid
    with contextlib.ExitStack() as stack:
        if status := asyncio.run(_Service(settings, stack).run()):
            raise UserError("a process exited with status 2 (invalid settings); see its error above")
        return status


def _check_files(settings: ServeSettings) -> None:
    """Raise UserError or ModelError for a file that a process of the service could not use."""
    check_model_files(settings)
    for keys in filter(None, (settings.api_keys_file, settings.admin_keys_file)):
        read_keys(keys)
    for client_ca in (settings.tls_client_ca_file, settings.metrics_client_ca_file):
        server_context(settings, client_ca)
    if settings.handler is not None and not Path(settings.handler.rpartition(":")[0]).is_file():
        raise UserError(f"--handler {settings.handler}: there is no such file; expected FILE.py:CLASS")


class _Service:
    """The processes of one service, and what they inherit.

    Args:
        stack: closes the sockets and files.
    """

    def __init__(self, settings: ServeSettings, stack: contextlib.ExitStack) -> None:
        self._settings = settings
        self._stack = stack
        self._notify = stack.enter_context(NotifyListener())
        self._http = self._socket(settings.host, settings.http_port, "http_port")
        self._admin = self._socket(settings.admin_host, settings.metrics_port, "metrics_port")
        self._grpc: socket.socket | None = None
        if settings.grpc_port is not None:
            self._grpc = self._socket(settings.host, settings.grpc_port, "grpc_port", reserve=True)
        self._joins = [
            self._socket(settings.join_host, settings.join_port_of(index), "join_port")
            for index in range(settings.leaders)
        ]
        self._restarts = _RestartCounts(settings, memory_file(stack, "metrics", ""))
        self._stop = asyncio.Event()
        self._groups: dict[tuple[Role, str], Supervisor] = {}
        """The processes by role and first part of the name."""

    async def run(self) -> int:
        """Run all processes until a signal, or until one of them ends because of invalid settings. Returns the exit status."""
        settings, loop = self._settings, asyncio.get_running_loop()
        on_stop_signal(self._begin_stop)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._notify.receiving())
            fork_server = stack.enter_context(child_fork_server(settings, self._notify.environment))
            # Leaving stops the last one first: frontends answer their requests, then leaders and workers stop.
            self._groups = {
                ("worker", _WORKER_NAME): self._workers(fork_server),
                ("leader", "leader"): self._leaders(fork_server),
                ("frontend", "frontend"): self._frontends(fork_server),
            }
            groups = list(self._groups.values())
            if settings.token_file or settings.api_keys_file or settings.admin_keys_file or settings.tls_cert_file:
                # Leaders reload only join tokens; without a token file the signal would end them.
                loop.add_signal_handler(
                    signal.SIGHUP, self._reload, groups[-2:] if settings.token_file else groups[-1:]
                )
            self._log_addresses()
            workers = 0 if settings.external_workers else settings.num_workers
            logger.info("starting leaders=%d frontends=%d workers=%d", settings.leaders, settings.frontends, workers)
            async with contextlib.AsyncExitStack() as running:
                for group in groups:
                    await running.enter_async_context(group)
                if (limits := limits_of(settings)) is not None:
                    await running.enter_async_context(Autoscaler(self, self._capacity_reports, ScalingPolicy(limits)))
                await running.enter_async_context(notify_systemd())
                ends = [self._stop, *(group.invalid_input for group in groups)]
                waits = [asyncio.create_task(end.wait()) for end in ends]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
            logger.info("stopped")
            return INVALID_INPUT if any(group.invalid_input.is_set() for group in groups) else 0

    def _begin_stop(self) -> None:
        logger.info("stopping; a second signal ends all processes at once")
        self._stop.set()

    def _reload(self, groups: list[Supervisor]) -> None:
        for group in groups:
            group.signal_all(signal.SIGHUP)

    # -- processes -------------------------------------------------------------------------------------------------------------

    def _leaders(self, fork_server: ForkServer) -> Supervisor:
        files = [
            settings_file(self._stack, {**leader_values(self._settings, index), "join_fd": sock.fileno()})
            for index, sock in enumerate(self._joins)
        ]
        return self._supervisor(
            "leader",
            lambda slot: ["leader", "--name", f"leader-{slot}", "--settings-json", files[slot]],
            self._settings.leaders,
            fork_server,
            lambda slot: [self._joins[slot].fileno()],
        )

    def _frontends(self, fork_server: ForkServer) -> Supervisor:
        settings = self._settings
        sockets = {"http_fd": self._http, "metrics_fd": self._admin} | ({"grpc_fd": self._grpc} if self._grpc else {})
        fds = {name: sock.fileno() for name, sock in sockets.items()}
        own: Values = {
            "leader": self._leader_addresses,
            **fds,
            "http_shares": settings.frontends,
            "supervisor_metrics_file": self._restarts.path,
        }
        is_text = settings.log_format == "text"
        files = [
            settings_file(
                self._stack,
                {**frontend_values(settings, index), **own, "banner": self._banner if index == 0 and is_text else None},
            )
            for index in range(settings.frontends)
        ]
        return self._supervisor(
            "frontend",
            lambda slot: ["frontend", "--name", f"frontend-{slot}", "--settings-json", files[slot]],
            settings.frontends,
            fork_server,
            lambda _slot: list(fds.values()),
        )

    def _supervisor(
        self,
        role: Role,
        arguments: Callable[[int], list[str]],
        count: int,
        fork_server: ForkServer,
        fds: Callable[[int], list[int]],
    ) -> Supervisor:
        """The supervisor of the leaders or frontends."""
        return Supervisor(
            lambda slot: [*PROGRAM, *arguments(slot)],
            count,
            kind=role,
            environment=program_environment(self._notify.environment),
            fork_server=fork_server,
            stop_timeout_s=stop_timeout_s(self._settings),
            fds=fds,
            notify=self._notify,
            blocked_timeout_s=blocked_timeout_s(self._settings),
            on_restart=lambda slot: self._restarts.count(role, slot),
        )

    def _workers(self, fork_server: ForkServer) -> Supervisor:
        """The supervisor of the local workers; it has no slots at first if the workers come from elsewhere."""
        settings = self._settings
        threads = compute_threads(settings)
        values = {**worker_values(settings), "leader": self._leader_addresses, "threads": threads}
        device, sharing = _devices(settings), _shared_cores(settings)

        @functools.cache
        def file(slot: int) -> str:
            own = {"name": f"{_WORKER_NAME}-{slot}", "device": device(slot), **sharing(slot)}
            return settings_file(self._stack, {**values, **own})

        return Supervisor(
            # The name is for people who read `ps`.
            lambda slot: [*PROGRAM, "worker", "--name", f"{_WORKER_NAME}-{slot}", "--settings-json", file(slot)],
            0 if settings.external_workers else settings.num_workers,
            environment=worker_environment(threads, self._notify.environment),
            fork_server=fork_server,
            notify=self._notify,
            blocked_timeout_s=worker_blocked_timeout_s(settings),
            on_restart=lambda slot: self._restarts.count("worker", slot),
        )

    # -- Launcher --------------------------------------------------------------------------------------------------------------

    async def processes(self) -> tuple[Launched, ...]:
        """See `Launcher.processes`."""
        return tuple(
            Launched(role, f"{name}-{slot}", "", group.pids.get(slot), restarts)
            for (role, name), group in self._groups.items()
            for slot, restarts in group.restarts.items()
        )

    async def scale_workers(self, count: int) -> None:
        """See `Launcher.scale_workers`."""
        workers = self._groups["worker", _WORKER_NAME]
        for _ in range(count - len(workers.restarts)):
            workers.add()

    async def stop_worker(self, name: str) -> None:
        """See `Launcher.stop_worker`."""
        prefix, _, slot = name.rpartition("-")
        if prefix != _WORKER_NAME or not slot.isdecimal():
            raise KeyError(name)
        await self._groups["worker", _WORKER_NAME].remove(int(slot))

    async def _capacity_reports(self) -> list[CapacityReport | None]:
        pids = [process.pid for process in await self.processes() if process.role == "leader"]
        return [None if pid is None else self._notify.capacity(pid, REPORT_AGE_S) for pid in pids]

    @property
    def _leader_addresses(self) -> str:
        host = _local_host(self._settings.join_host)
        return ",".join(f"{host}:{sock.getsockname()[1]}" for sock in self._joins)

    # -- what they inherit -----------------------------------------------------------------------------------------------------

    def _socket(self, host: str, port: int, name: str, *, reserve: bool = False) -> socket.socket:
        """A socket of a port (see `bind`) whose descriptor has a high number, because a forked child gets the same one."""
        with bind(host, port, option(name), reserve=reserve) as found:
            fd = fcntl.fcntl(found.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
        return self._stack.enter_context(socket.socket(fileno=fd))

    @property
    def _urls(self) -> tuple[str, str]:
        """The URLs of the HTTP API and of the admin port."""
        settings = self._settings
        scheme = "http" if settings.tls_cert_file is None else "https"
        http = f"{scheme}://{_local_host(settings.host)}:{self._http.getsockname()[1]}"
        return http, f"{scheme}://{_local_host(settings.admin_host)}:{self._admin.getsockname()[1]}"

    @property
    def _grpc_address(self) -> str:
        """HOST:PORT of the gRPC port; empty without one."""
        return f"{_local_host(self._settings.host)}:{self._grpc.getsockname()[1]}" if self._grpc else ""

    @property
    def _join_addresses(self) -> str:
        return ",".join(f"{self._settings.join_host}:{sock.getsockname()[1]}" for sock in self._joins)

    @property
    def _banner(self) -> str:
        http, admin = self._urls
        return banner(
            self._settings, http_url=http, admin_url=admin, joins=self._join_addresses, grpc=self._grpc_address
        )

    def _log_addresses(self) -> None:
        settings, (http, admin) = self._settings, self._urls
        grpc = f" grpc={self._grpc_address}" if self._grpc else ""
        logger.info("listening http=%s metrics=%s/metrics join=%s%s", http, admin, self._join_addresses, grpc)
        if settings.external_workers:
            there = _external_host(settings.join_host)
            each = " ".join(
                f"--leader {settings.advertised(sock.getsockname()[1]) or f'{there}:{sock.getsockname()[1]}'}"
                for sock in self._joins
            )
            logger.info("waiting for workers; on each of their machines: multiworld worker %s --token-file …", each)


class _RestartCounts:
    """Counts restarts in a file in memory, which the frontends add to their metrics."""

    def __init__(self, settings: ServeSettings, path: str) -> None:
        self.path = path
        self._families = Families()
        self._counters: dict[str, Counter] = {}
        slots = {"leader": settings.leaders, "frontend": settings.frontends, "worker": settings.num_workers}
        for kind, count in slots.items():
            counter = Counter(f"multiworld_{kind}_restarts_total", f"Restarts of {kind}s by the supervisor.", ("slot",))
            self._families.all.append(counter)
            self._counters[kind] = counter
            for slot in range(count):
                counter.labels(str(slot))
        self._write()

    def count(self, kind: str, slot: int) -> None:
        self._counters[kind].labels(str(slot)).inc()
        self._write()

    def _write(self) -> None:
        Path(self.path).write_text(self._families.text(), encoding="utf-8")


def _devices(settings: ServeSettings) -> Callable[[int], str]:
    """Return the device of each local worker: "cuda" without an index assigns the GPUs of this machine round-robin. Raises UserError."""
    if settings.device == "cpu" or settings.external_workers:
        return lambda _slot: settings.device
    try:
        command = [sys.executable, "-c", _COUNT_CUDA_DEVICES]
        count = int(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)  # noqa: S603
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise UserError(f"--device {settings.device}: cannot count the GPUs of this machine: {error}") from error
    _, _, index = settings.device.partition(":")
    if int(index or 0) >= count:
        there = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device"
        raise UserError(
            f"device {settings.device!r} does not exist: this machine has {there}; use --device cpu or another index"
        )
    return lambda slot: settings.device if index else f"cuda:{slot % count}"


def _shared_cores(settings: ServeSettings) -> Callable[[int], Values]:
    """Return a function from slot to the settings with which the workers share the cores; none if threads are configured."""
    if settings.threads or settings.device != "cpu":
        return lambda slot: {}
    file = f"/proc/{os.getpid()}/fd/{os.memfd_create('cores')}"  # disappears with this process
    count = settings.max_workers
    return lambda slot: {"cores_file": file, "cores_index": slot, "cores_workers": max(count, slot + 1)}


def _local_host(host: str) -> str:
    """The address at which this machine's own processes reach a listener on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - translated, not bound
    return f"[{reachable}]" if ":" in reachable else reachable


def _external_host(host: str) -> str:
    """The name by which other machines reach a listener on `host`."""
    name = socket.gethostname() if host in {"0.0.0.0", "::"} else host  # noqa: S104 - translated, not bound
    return f"[{name}]" if ":" in name else name
