"""`multiworld serve`: starts leaders, frontends and local workers, restarts those that end, and stops them in order.

This process imports no torch and carries no request. It opens all listening sockets and passes them on, so a restarted process continues
on the same port, and clients that connect meanwhile wait instead of being refused.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import SecretStr

from multiworld_serving.common.config import Settings, UserError, raise_descriptor_limit
from multiworld_serving.common.config.process import notify_systemd
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
from multiworld_serving.deploy.processes.notify import NotifyListener
from multiworld_serving.deploy.processes.supervisor import INVALID_INPUT, Supervisor
from multiworld_serving.server.settings import FrontendSettings, LeaderSettings, ServeSettings

logger = logging.getLogger(__name__)

_FIRST_FD = 200
"""Inherited descriptors have numbers from here on, which no child has in use."""
_BLOCKED_HEARTBEATS = 3
_BLOCKED_S = 5.0
"""A leader or frontend that gives no sign of life for this long is killed; at least `_BLOCKED_HEARTBEATS` heartbeat timeouts."""
_STOP_MARGIN_S = 5.0
"""Seconds from the end of the drain timeout to SIGKILL."""
_COUNT_CUDA_DEVICES = "import torch; print(torch.cuda.device_count())"


def run(settings: ServeSettings) -> int:
    """Run the service until SIGTERM or Ctrl-C. Returns the exit status.

    Raises:
        UserError: a port is in use, a file is missing, or the device does not exist.
    """
    raise_descriptor_limit()
    settings = settings.replace("local_token", SecretStr(new_token().get_secret_value()), "generated")
    settings.accepted_secrets  # noqa: B018 - raises if the token file is invalid
    with contextlib.ExitStack() as stack:
        service = _Service(settings, stack)
        return asyncio.run(service.run())


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
        self._joins = [
            self._socket(settings.join_host, settings.join_port_of(index), "join_port")
            for index in range(settings.leaders)
        ]
        self._restarts = _RestartCounts(settings, _memory_file(stack, "metrics", ""))
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Run all processes until a signal, or until one of them ends because of invalid settings. Returns the exit status."""
        settings, loop = self._settings, asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal, signum)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._notify.receiving())
            fork_server = stack.enter_context(child_fork_server(settings, self._notify.environment))
            # Leaving stops the last one first: frontends answer their requests, then leaders and workers stop.
            groups = [*self._workers(fork_server), self._leaders(fork_server), self._frontends(fork_server)]
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
                await running.enter_async_context(notify_systemd())
                ends = [self._stop, *(group.invalid_input for group in groups)]
                waits = [asyncio.create_task(end.wait()) for end in ends]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
            logger.info("stopped")
            return INVALID_INPUT if any(group.invalid_input.is_set() for group in groups) else 0

    def _on_signal(self, signum: signal.Signals) -> None:
        """The first signal stops the service; the second one ends it at once, and the kernel ends its processes with it."""
        if self._stop.is_set():
            asyncio.get_running_loop().remove_signal_handler(signum)
            signal.raise_signal(signum)
        logger.info("stopping")
        self._stop.set()

    def _reload(self, groups: list[Supervisor]) -> None:
        for group in groups:
            group.signal_all(signal.SIGHUP)

    # -- processes -------------------------------------------------------------------------------------------------------------

    def _leaders(self, fork_server: ForkServer) -> Supervisor:
        settings = self._settings
        files = [
            self._settings_file(
                LeaderSettings,
                leader_name=f"leader-{index}",
                exit_with_parent=True,
                join_fd=sock.fileno(),
                metrics_port=None,
                metrics_host=None,
            )
            for index, sock in enumerate(self._joins)
        ]
        return Supervisor(
            lambda slot: [*PROGRAM, "leader", "--leader-name", f"leader-{slot}", "--config", files[slot]],
            settings.leaders,
            kind="leader",
            environment=program_environment(self._notify.environment),
            fork_server=fork_server,
            stop_timeout_s=settings.drain_timeout_s + _STOP_MARGIN_S,
            fds=lambda slot: [self._joins[slot].fileno()],
            notify=self._notify,
            blocked_timeout_s=self._blocked_s,
            on_restart=lambda slot: self._restarts.count("leader", slot),
        )

    def _frontends(self, fork_server: ForkServer) -> Supervisor:
        settings = self._settings
        files = [
            self._settings_file(
                FrontendSettings,
                name=f"frontend-{index}",
                exit_with_parent=True,
                leader=self._leader_addresses,
                http_fd=self._http.fileno(),
                metrics_fd=self._admin.fileno(),
                http_shares=settings.frontends,
                banner=self._banner if index == 0 and settings.log_format == "text" else None,
                supervisor_metrics_file=self._restarts.path,
            )
            for index in range(settings.frontends)
        ]
        return Supervisor(
            lambda slot: [*PROGRAM, "frontend", "--name", f"frontend-{slot}", "--config", files[slot]],
            settings.frontends,
            kind="frontend",
            environment=program_environment(self._notify.environment),
            fork_server=fork_server,
            stop_timeout_s=settings.drain_timeout_s + _STOP_MARGIN_S,
            fds=lambda _slot: [self._http.fileno(), self._admin.fileno()],
            notify=self._notify,
            blocked_timeout_s=self._blocked_s,
            on_restart=lambda slot: self._restarts.count("frontend", slot),
        )

    def _workers(self, fork_server: ForkServer) -> list[Supervisor]:
        """The supervisor of the local workers, if there are any."""
        settings = self._settings
        if settings.external_workers:
            return []
        devices = _devices(settings)
        shared: dict[str, object] = {
            "leader": self._leader_addresses,
            "threads": compute_threads(settings),
            "heartbeat_interval_s": settings.heartbeat_interval_s,
            "heartbeat_timeout_s": settings.heartbeat_timeout_s,
            "loop_stall_timeout_s": settings.loop_stall_timeout_s,
            "join_timeout_s": settings.join_timeout_s,
            "log_level": settings.log_level,
            "log_format": settings.log_format,
            "edges": settings.edges,
            "edge_memory": settings.edge_memory,
        }
        if settings.advertise_edge is not None:
            shared["advertise_edge"] = settings.advertise_edge
        if settings.otlp_endpoint is not None:
            shared["otlp_endpoint"] = settings.otlp_endpoint
        rest = [part for name, value in shared.items() for part in (option(name), str(value))]
        sharing = _shared_cores(settings)
        return [
            Supervisor(
                # The name comes first, because `ps` may truncate the command line.
                lambda slot: [
                    *(*PROGRAM, "worker", "--name", f"local-{slot}", "--device", devices[slot], "--exit-with-parent"),
                    *(*rest, *sharing(slot)),
                ],
                settings.num_workers,
                environment=worker_environment(settings, self._notify.environment),
                fork_server=fork_server,
                notify=self._notify,
                blocked_timeout_s=settings.replace_hung_after_s or float("inf"),
                on_restart=lambda slot: self._restarts.count("worker", slot),
            )
        ]

    @property
    def _blocked_s(self) -> float:
        return max(_BLOCKED_S, _BLOCKED_HEARTBEATS * self._settings.heartbeat_timeout_s)

    @property
    def _leader_addresses(self) -> str:
        host = _local_host(self._settings.join_host)
        return ",".join(f"{host}:{sock.getsockname()[1]}" for sock in self._joins)

    # -- what they inherit -----------------------------------------------------------------------------------------------------

    def _socket(self, host: str, port: int, name: str) -> socket.socket:
        """A listening socket whose descriptor has a high number, because a forked child gets the same one."""
        with bind(host, port, option(name)) as found:
            fd = fcntl.fcntl(found.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
        return self._stack.enter_context(socket.socket(fileno=fd))

    def _settings_file(self, cls: type[Settings], **changes: object) -> str:
        """Path of a TOML file in memory with all settings of a program. Only processes of this user can read it."""
        values = {name: getattr(self._settings, name) for name in cls.model_fields if hasattr(self._settings, name)}
        if values["token_file"] is not None:
            values["token"] = None  # read from the file
        return _memory_file(self._stack, cls.section, _toml(cls.section, {**values, **changes}))

    @property
    def _urls(self) -> tuple[str, str]:
        """The URLs of the HTTP API and of the admin port."""
        settings = self._settings
        scheme = "http" if settings.tls_cert_file is None else "https"
        http = f"{scheme}://{_local_host(settings.host)}:{self._http.getsockname()[1]}"
        return http, f"{scheme}://{_local_host(settings.admin_host)}:{self._admin.getsockname()[1]}"

    @property
    def _join_addresses(self) -> str:
        return ",".join(f"{self._settings.join_host}:{sock.getsockname()[1]}" for sock in self._joins)

    @property
    def _banner(self) -> str:
        http, admin = self._urls
        return banner(self._settings, http_url=http, admin_url=admin, joins=self._join_addresses)

    def _log_addresses(self) -> None:
        settings, (http, admin) = self._settings, self._urls
        logger.info("listening http=%s metrics=%s/metrics join=%s", http, admin, self._join_addresses)
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


def _memory_file(stack: contextlib.ExitStack, name: str, text: str) -> str:
    """Path of a file in memory with this text; it disappears with this process."""
    file = stack.enter_context(os.fdopen(os.memfd_create(name), "w", encoding="utf-8"))
    file.write(text)
    file.flush()
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _toml(section: str, values: Mapping[str, object]) -> str:
    lines = [f"[{section}]"]
    for name, value in values.items():
        plain = value.get_secret_value() if isinstance(value, SecretStr) else value
        if plain is not None:
            text = str(plain) if isinstance(plain, Path) else plain
            literal = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # the only difference to TOML
            lines.append(f"{name} = {literal}")
    return "\n".join(lines) + "\n"


def _devices(settings: ServeSettings) -> list[str]:
    """A device for each local worker: "cuda" without an index assigns the GPUs of this machine round-robin. Raises UserError."""
    if settings.device == "cpu":
        return ["cpu"] * settings.num_workers
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
    return [settings.device if index else f"cuda:{slot % count}" for slot in range(settings.num_workers)]


def _shared_cores(settings: ServeSettings) -> Callable[[int], list[str]]:
    """Return a function from slot to the options with which the workers share the cores; no options if threads are configured."""
    count = settings.num_workers
    if settings.worker_threads or settings.device != "cpu":
        return lambda slot: []
    file = f"/proc/{os.getpid()}/fd/{os.memfd_create('cores')}"  # disappears with this process
    return lambda slot: ["--cores-file", file, "--cores-index", str(slot), "--cores-workers", str(count)]


def _local_host(host: str) -> str:
    """The address at which this machine's own processes reach a listener on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - translated, not bound
    return f"[{reachable}]" if ":" in reachable else reachable


def _external_host(host: str) -> str:
    """The name by which other machines reach a listener on `host`."""
    name = socket.gethostname() if host in {"0.0.0.0", "::"} else host  # noqa: S104 - translated, not bound
    return f"[{name}]" if ":" in name else name
