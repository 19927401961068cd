"""`multiworld serve`: starts leaders, frontends and local workers, restarts those that end, and stops them in order.

This process carries no request. It imports what the others need and forks them, so that a restart takes milliseconds. It opens all
listening sockets and passes them on, so a restarted process continues on the same port, and clients that connect meanwhile wait instead
of being refused.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import symtable
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from multiworld_serving.common.config import UserError, raise_descriptor_limit
from multiworld_serving.common.config.keys import read_keys
from multiworld_serving.common.config.process import notify_systemd, on_stop_signal
from multiworld_serving.common.config.sources import option
from multiworld_serving.common.config.tokens import new_token
from multiworld_serving.common.http.listener import bind
from multiworld_serving.deploy.processes.child_process import ChildProcess
from multiworld_serving.deploy.processes.notify import NotifyListener
from multiworld_serving.deploy.processes.programs import (
    PROGRAM,
    WORKER_BLOCKED_S,
    Role,
    Values,
    blocked_timeout_s,
    compute_threads,
    environment_of,
    frontend_values,
    import_programs,
    leader_values,
    memory_file,
    settings_file,
    stop_timeout_s,
    worker_values,
)
from multiworld_serving.deploy.processes.supervisor import INVALID_INPUT, Supervisor
from multiworld_serving.deploy.scaling.autoscaler import REPORT_AGE_S, Autoscaler, limits_of
from multiworld_serving.deploy.scaling.policy import ScalingPolicy
from multiworld_serving.server.capacity_report import CapacityReport
from multiworld_serving.server.http.tls import server_context
from multiworld_serving.server.settings import ServeSettings
from multiworld_serving.server.versions.model_files import available_weights, check_model_files

logger = logging.getLogger(__name__)

_NAMES: dict[Role, str] = {"worker": "local", "leader": "leader", "frontend": "frontend"}
"""First part of the names of the processes, in the order in which they start."""
_WORKER_STOP_S = 10.0
"""From SIGTERM to SIGKILL of a worker."""
_COUNT_CUDA_DEVICES = "import torch; print(torch.cuda.device_count())"


def run(settings: ServeSettings, program: Callable[[Sequence[str]], object]) -> int:
    """Run the service until SIGTERM or Ctrl-C. Returns the exit status.

    Args:
        program: see `_Service`.
    Raises:
        UserError, models.ModelError: a port is in use, a file is missing, or the device does not exist. No process was started.
    """
    _check_files(settings)
    settings = settings.model_copy(update={"weights": available_weights(settings)})
    raise_descriptor_limit()
    settings = settings.model_copy(update={"local_token": new_token()})
    settings.accepted_secrets  # noqa: B018 - raises if the token file is invalid
    with contextlib.ExitStack() as stack:
        service = _Service(settings, stack, program)
        service.import_programs()
        _check_bundle(settings)
        if status := asyncio.run(service.run()):
            raise UserError("a process exited with status 2 (invalid settings); see its error above")
        return status


def _check_files(settings: ServeSettings) -> None:
    """Raise UserError or ModelError for a file that a process of the service could not use."""
    check_model_files(settings)
    for keys in filter(None, (settings.api_keys_file, settings.admin_keys_file)):
        read_keys(keys)
    for client_ca in (settings.tls_client_ca_file, settings.metrics_client_ca_file):
        server_context(settings, client_ca)
    if settings.handler is not None:
        _check_handler(settings.handler)


def _check_bundle(settings: ServeSettings) -> None:
    """Raise ModelError if the bundle does not have these stages or batches. Call it after `import_programs`: it imports torch."""
    from multiworld_serving.server.versions.model_source import ModelSource  # noqa: PLC0415

    ModelSource(settings).check()


def _check_handler(handler: str) -> None:
    """Raise UserError if the file cannot be read or is not Python, or does not define the class. Does not run it."""
    file, _, name = handler.rpartition(":")
    try:
        names = symtable.symtable(Path(file).read_text(encoding="utf-8"), file, "exec").get_identifiers()
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise UserError(f"--handler {handler}: cannot be read: {error}; expected FILE.py:CLASS") from error
    if name not in names:
        raise UserError(f"--handler {handler}: {file} does not define {name}; expected FILE.py:CLASS")


class _Service:
    """The processes of one service, and what they inherit.

    Args:
        stack: closes the sockets and files.
        program: runs a command line of `multiworld` and ends the process.
    """

    def __init__(
        self, settings: ServeSettings, stack: contextlib.ExitStack, program: Callable[[Sequence[str]], object]
    ) -> None:
        self._settings = settings
        self._program = program
        self._can_fork = False
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
        self._restarts_file = memory_file(stack, "metrics", "")
        self._cores_file = f"/proc/{os.getpid()}/fd/{os.memfd_create('cores')}"  # disappears with this process
        self._files: dict[tuple[Role, int], str] = {}
        """The settings of each process."""
        self._devices = _devices(settings)
        self._stop = asyncio.Event()
        self._groups: dict[Role, Supervisor] = {}

    def import_programs(self) -> None:
        """Import what the processes need. A signal meanwhile ends this process: nothing runs yet."""
        self._log_addresses()
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: os._exit(0))
        self._can_fork = import_programs(compute_threads(self._settings))
        if not self._can_fork:
            logger.warning("an import has started a thread: processes start as new programs, which takes longer")

    async def run(self) -> int:
        """Run all processes until a signal, or until one of them ends because of invalid settings. Returns the exit status."""
        settings = self._settings
        on_stop_signal(self._begin_stop)
        with self._notify.receiving():
            # Leaving stops the last one first: frontends answer their requests, then leaders and workers stop.
            self._groups = {role: self._supervisor(role) for role in _NAMES}
            groups = self._groups.values()
            self._write_restarts()
            self._reload_on_hangup()
            logger.info("starting %s", " ".join(f"{role}s={group.count}" for role, group in self._groups.items()))
            async with contextlib.AsyncExitStack() as running:
                for group in groups:
                    await running.enter_async_context(group)
                if (limits := limits_of(settings)) is not None:
                    await running.enter_async_context(Autoscaler(self, ScalingPolicy(limits)))
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

    def _reload_on_hangup(self) -> None:
        """Forward SIGHUP to the processes that read keys, certificates or tokens from files; it would end the others."""
        settings = self._settings
        files = (settings.token_file, settings.api_keys_file, settings.admin_keys_file, settings.tls_cert_file)
        roles: tuple[Role, ...] = ("leader", "frontend") if settings.token_file else ("frontend",)

        def forward() -> None:
            for role in roles:
                self._groups[role].signal_all(signal.SIGHUP)

        if any(files):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, forward)

    # -- processes -------------------------------------------------------------------------------------------------------------

    def _supervisor(self, role: Role) -> Supervisor:
        settings = self._settings
        workers = 0 if settings.external_workers else settings.num_workers
        counts = {"worker": workers, "leader": settings.leaders, "frontend": settings.frontends}
        is_worker = role == "worker"
        return Supervisor(
            lambda slot: self._start(role, slot),
            counts[role],
            kind=role,
            stop_timeout_s=_WORKER_STOP_S if is_worker else stop_timeout_s(settings),
            notify=self._notify,
            blocked_timeout_s=WORKER_BLOCKED_S if is_worker else blocked_timeout_s(settings),
            on_restart=self._write_restarts,
        )

    def _command(self, role: Role, slot: int) -> list[str]:
        return [role, "--name", f"{_NAMES[role]}-{slot}", "--settings-json", self._file(role, slot)]

    def _start(self, role: Role, slot: int) -> ChildProcess:
        command = self._command(role, slot)
        threads = compute_threads(self._settings) if role == "worker" else 1
        environment, fds = environment_of(threads, self._notify.environment), list(self._fds(role, slot).values())
        if self._can_fork:
            title = " ".join(["multiworld", *command])
            return ChildProcess.fork(title, partial(self._program, command), environment, fds)
        return ChildProcess.spawn([*PROGRAM, *command], environment, fds)

    def _file(self, role: Role, slot: int) -> str:
        """Path of the settings of a process, written at its first start."""
        if (role, slot) not in self._files:
            self._files[role, slot] = settings_file(self._stack, self._values(role, slot))
        return self._files[role, slot]

    def _values(self, role: Role, slot: int) -> Values:
        settings, fds = self._settings, self._fds(role, slot)
        if role == "leader":
            return {**leader_values(settings, slot), **fds}
        host = _local_host(settings.join_host)
        own: Values = {"leader": ",".join(f"{host}:{sock.getsockname()[1]}" for sock in self._joins)}
        if role == "frontend":
            own |= {"http_shares": settings.frontends, "supervisor_metrics_file": self._restarts_file}
            return {**frontend_values(settings, slot), **own, **fds}
        own |= {
            "name": f"{_NAMES[role]}-{slot}",
            "threads": compute_threads(settings),
            "device": self._devices[slot % len(self._devices)],
        }
        if not settings.threads and settings.device == "cpu":  # the workers share the cores
            count = max(settings.max_workers, slot + 1)
            own |= {"cores_file": self._cores_file, "cores_index": slot, "cores_workers": count}
        return {**worker_values(settings), **own}

    def _fds(self, role: Role, slot: int) -> dict[str, int]:
        """The descriptors of the sockets that a process inherits, by setting."""
        sockets: dict[str, socket.socket | None] = {}
        if role == "leader":
            sockets = {"join_fd": self._joins[slot]}
        elif role == "frontend":
            sockets = {"http_fd": self._http, "metrics_fd": self._admin, "grpc_fd": self._grpc}
        return {name: sock.fileno() for name, sock in sockets.items() if sock is not None}

    def _write_restarts(self) -> None:
        """Write the numbers of restarts into a file in memory. The frontends add them to their metrics."""
        text = restart_metrics({role: group.restarts for role, group in self._groups.items()})
        with contextlib.suppress(OSError):  # no memory; must not stop any process
            Path(self._restarts_file).write_text(text, encoding="utf-8")

    # -- Launcher --------------------------------------------------------------------------------------------------------------

    async def capacity_reports(self) -> list[CapacityReport | None]:
        """See `Launcher`."""
        leaders = self._groups["leader"]
        pids = [leaders.pids.get(slot) for slot in leaders.restarts]
        return [None if pid is None else self._notify.capacity(pid, REPORT_AGE_S) for pid in pids]

    async def workers(self) -> set[str]:
        """See `Launcher`."""
        return {f"{_NAMES['worker']}-{slot}" for slot in self._groups["worker"].restarts}

    async def scale_workers(self, count: int) -> None:
        """See `Launcher`."""
        workers = self._groups["worker"]
        for _ in range(count - len(workers.restarts)):
            workers.add()

    async def stop_worker(self, name: str) -> None:
        """See `Launcher`."""
        await self._groups["worker"].remove(int(name.removeprefix(f"{_NAMES['worker']}-")))

    # -- addresses -------------------------------------------------------------------------------------------------------------

    def _socket(self, host: str, port: int, name: str, *, reserve: bool = False) -> socket.socket:
        return self._stack.enter_context(bind(host, port, option(name), reserve=reserve))

    def _log_addresses(self) -> None:
        settings = self._settings
        scheme = "http" if settings.tls_cert_file is None else "https"
        host, admin_host = _local_host(settings.host), _local_host(settings.admin_host)
        logger.info(
            "listening http=%s://%s:%d metrics=%s://%s:%d/metrics join=%s%s",
            *(scheme, host, self._http.getsockname()[1], scheme, admin_host, self._admin.getsockname()[1]),
            ",".join(f"{settings.join_host}:{sock.getsockname()[1]}" for sock in self._joins),
            f" grpc={host}:{self._grpc.getsockname()[1]}" if self._grpc else "",
        )
        if settings.external_workers:
            there = _external_host(settings.join_host)
            each = " ".join(
                f"--leader {settings.advertised(sock.getsockname()[1]) or f'{there}:{sock.getsockname()[1]}'}"
                for sock in self._joins
            )
            logger.info("waiting for workers; on each of their machines: multiworld worker %s --token-file …", each)


def restart_metrics(restarts: Mapping[Role, Mapping[int, int]]) -> str:
    """The restarts by role and slot, in the text format of Prometheus."""
    lines = []
    for role, of_role in restarts.items():
        name = f"multiworld_{role}_restarts_total"
        lines += [f"# HELP {name} Restarts of {role}s by the supervisor.", f"# TYPE {name} counter"]
        lines += [f'{name}{{slot="{slot}"}} {count}' for slot, count in of_role.items()]
    return "\n".join(lines) + "\n"


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


def _local_host(host: str) -> str:
    """The address at which this machine's own processes reach a listener on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - translated, not bound
    return f"[{reachable}]" if ":" in reachable else reachable


def _external_host(host: str) -> str:
    """The name by which other machines reach a listener on `host`."""
    name = socket.gethostname() if host in {"0.0.0.0", "::"} else host  # noqa: S104 - translated, not bound
    return f"[{name}]" if ":" in name else name
