"""`multiworld serve`: starts leaders, frontends and local workers, restarts those that end, and stops them in order.

This process carries no request. It imports what the others need and forks them, so that a restart takes milliseconds. It opens all
listening sockets and passes them on, so a restarted process continues on the same port, and clients that connect meanwhile wait instead
of being refused. On SIGUSR2, a new `multiworld serve` takes its place; see `upgrade.py`.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import symtable
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.keys import read_keys
from multiworld_serving.common.config.process import first_of, notify_systemd, on_stop_signal, raise_descriptor_limit
from multiworld_serving.common.config.sources import option
from multiworld_serving.common.config.tokens import new_token
from multiworld_serving.common.http.listener import bind
from multiworld_serving.deploy.processes.child_process import ChildProcess
from multiworld_serving.deploy.processes.group import NAMES, Group, external_host_of, local_host_of
from multiworld_serving.deploy.processes.models import Frontends, Models, Table
from multiworld_serving.deploy.processes.notify import NotifyListener
from multiworld_serving.deploy.processes.programs import (
    PROGRAM,
    Role,
    Values,
    blocked_timeout_s,
    environment_of,
    frontend_values,
    import_programs,
    memory_file,
    settings_file,
    stop_timeout_s,
)
from multiworld_serving.deploy.processes.supervisor import INVALID_INPUT, ProcessSet, Supervisor
from multiworld_serving.deploy.processes.upgrade import Predecessor, become_forwarder, hold_signals, start_successor
from multiworld_serving.server.http.tls import server_context
from multiworld_serving.server.model_change import ModelChange
from multiworld_serving.server.settings import MODEL_NAME, MODEL_NAME_ALLOWED, ServeSettings
from multiworld_serving.server.versions.model_files import available_weights, check_model_files, served_name

logger = logging.getLogger(__name__)


def run(settings: ServeSettings, program: Callable[[Sequence[str]], object]) -> int:
    """Run the service until SIGTERM or Ctrl-C. Returns the exit status.

    Args:
        program: see `_Service`.
    Raises:
        UserError, models.ModelError: a port is in use, a file is missing, or the device does not exist. No process was started.
    """
    predecessor = Predecessor.of_environment()
    settings = settings.model_copy(update={"local_token": new_token()})
    settings.accepted_secrets  # noqa: B018 - raises if the token file is invalid
    _check_files(settings)
    changes = {} if predecessor is None else predecessor.changes
    models = _prepared(_changed(settings, changes))
    if predecessor is not None:  # its leaders still use their ports, and all workers are on this machine
        models = {name: each.model_copy(update={"join_port": 0}) for name, each in models.items()}
    raise_descriptor_limit()
    with contextlib.ExitStack() as stack:
        service = _Service(settings, models, stack, program, predecessor)
        service.import_programs()
        for each in models.values():
            _check_bundle(each)
        if status := asyncio.run(service.run()):
            raise UserError("a process exited with status 2 (invalid settings); see its error above")
    if service.successor is not None:
        become_forwarder(service.successor)
    return status


def _changed(settings: ServeSettings, changes: Mapping[str, Table | None]) -> list[ServeSettings]:
    """The settings of each model, with the models that commands have added to the service that this one replaces, or removed."""
    kept = [each for each in settings.groups if served_name(each) not in changes]
    return kept + [settings.group_of(table) for table in changes.values() if table is not None]


def _prepared(groups: Sequence[ServeSettings]) -> dict[str, ServeSettings]:
    """The settings of each model by its name, when its files are checked and exported. Raises UserError or ModelError."""
    models: dict[str, ServeSettings] = {}
    for given in groups:
        check_model_files(given)
        if given.handler is not None:
            _check_handler(given.handler)
    for given in groups:
        each = given.model_copy(update={"weights": available_weights(given)})
        name = served_name(each)
        if len(groups) > 1 and not re.fullmatch(MODEL_NAME, name):
            raise UserError(f"the model {name!r} needs a name of {MODEL_NAME_ALLOWED}; write NAME={each.model_source}")
        if name in models:
            raise UserError(f"two models have the name {name!r}: choose different ones with NAME=SOURCE")
        models[name] = each
    return models


def _check_files(settings: ServeSettings) -> None:
    """Raise UserError for a file that a frontend could not use."""
    for keys in filter(None, (settings.api_keys_file, settings.admin_keys_file)):
        read_keys(keys)
    for client_ca in (settings.tls_client_ca_file, settings.metrics_client_ca_file):
        server_context(settings, client_ca)


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
        models: the settings of each model by its name.
        stack: closes the sockets and files.
        program: runs a command line of `multiworld` and ends the process.
        predecessor: the service that this one replaces, if any.

    Attributes:
        notify: receives the signs of life of all processes.
        groups: the leaders and workers of each model.
        frontends: the frontends that accept requests now.
        successor: the supervisor that has replaced this one.
    """

    def __init__(
        self,
        settings: ServeSettings,
        models: Mapping[str, ServeSettings],
        stack: contextlib.ExitStack,
        program: Callable[[Sequence[str]], object],
        predecessor: Predecessor | None = None,
    ) -> None:
        self._settings = settings
        self._program = program
        self._predecessor = predecessor
        self.successor: ChildProcess | None = None
        self._changing: asyncio.Task[None] | None = None
        """An upgrade, or a change of the models. There is one at a time."""
        self._file_changed = False
        self._sockets: dict[str, socket.socket] = {}
        self._can_fork = False
        self._stack = stack
        self.notify = stack.enter_context(NotifyListener())
        self._http = self._socket(settings.host, settings.http_port, "http_port")
        self._admin = self._socket(settings.admin_host, settings.metrics_port, "metrics_port")
        self._grpc: socket.socket | None = None
        if settings.grpc_port is not None:
            self._grpc = self._socket(settings.host, settings.grpc_port, "grpc_port", reserve=True)
        self._restarts_file = memory_file(stack, "metrics", "")
        self._changes_file = memory_file(stack, "changes", "{}")
        changes = {} if predecessor is None else predecessor.changes
        self._models = Models(settings, self, changes, Path(self._changes_file))
        self._generations: list[Frontends] = []
        self._stop = asyncio.Event()
        cores_file = f"/proc/{os.getpid()}/fd/{os.memfd_create('cores')}"  # disappears with this process
        workers, first = sum(each.max_workers for each in models.values()), 0
        self.groups: dict[str, Group] = {}
        for name, each in models.items():
            prefix = f"{name}-" if len(models) > 1 else ""
            cores = cores_file, first
            self.groups[name] = Group(each, self, stack, prefix=prefix, workers=workers, cores=cores)
            first += each.max_workers
        self.frontends = self.new_frontends(self.groups, None if predecessor is None else tuple(models))
        self.notify.on_change = self._change_models

    def import_programs(self) -> None:
        """Import what the processes need. A signal meanwhile ends this process: nothing runs yet."""
        self._log_addresses()
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: os._exit(0))
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # there is nothing to upgrade yet
        self._can_fork = import_programs(max(group.threads for group in self.groups.values()))
        if not self._can_fork:
            logger.warning("an import has started a thread: processes start as new programs, which takes longer")

    async def run(self) -> int:
        """Run all processes until a signal, or until one of them ends because of invalid settings. Returns the exit status."""
        on_stop_signal(self._begin_stop)
        with self.notify.receiving():
            self.write_restarts()
            self._reload_on_hangup()
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._begin_upgrade)
            initial: list[ProcessSet] = [*self.groups.values(), self.frontends]
            async with asyncio.TaskGroup() as self.tasks:
                for each in initial:
                    each.start(self.tasks)
                async with notify_systemd():
                    if self._predecessor is not None:
                        self._begin(self._replace(self._predecessor))
                    await first_of(self._stop.wait(), *(each.invalid_input() for each in initial))
                    if self._changing is not None:
                        self._changing.cancel()
                        await asyncio.wait({self._changing})
                # Frontends answer their requests before leaders and workers stop.
                for running in (self._generations, self.groups.values()):
                    await asyncio.gather(*(each.stop() for each in running))
            if self.successor is not None:
                hold_signals()
            logger.info("stopped")
            invalid = (each.invalid_input.is_set() for every in initial for each in every.supervisors.values())
            return INVALID_INPUT if any(invalid) else 0

    def _begin_stop(self) -> None:
        logger.info("stopping; a second signal ends all processes at once")
        if self.successor is not None:
            self.successor.send(signal.SIGTERM)
        self._stop.set()

    def _begin_upgrade(self) -> None:
        if any(group.is_reachable for group in self.groups.values()):
            logger.error(
                "no upgrade: workers of other machines may join the leaders; restart the programs one at a time"
            )
        elif self._busy:
            logger.error("no upgrade: the last one, or a change of the models, has not ended")
        else:
            self._begin(self._upgrade())

    @property
    def _busy(self) -> bool:
        return self.successor is not None or self._changing is not None

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._changing = asyncio.create_task(self._end(work))

    async def _end(self, work: Coroutine[Any, Any, None]) -> None:
        """Run an upgrade or a change, then read the file with the models if SIGHUP has arrived meanwhile."""
        try:
            await work
            while self._file_changed and self.successor is None:
                self._file_changed = False
                await self._models.read_file()
        except Exception:
            logger.exception("an upgrade or a change of the models has failed")
        finally:
            self._changing = None
            self.write_restarts()

    async def _upgrade(self) -> None:
        """Start a new service. Stop this one when the new one serves."""
        self.successor = await start_successor(self._sockets, self._models.changes)
        if self.successor is not None:
            logger.info("upgraded: the new supervisor serves pid=%d", self.successor.pid)
            if self._file_changed:
                self.successor.send(signal.SIGHUP)
            os.environ.pop("NOTIFY_SOCKET", None)  # for systemd, the service does not stop
            self._stop.set()

    async def _replace(self, predecessor: Predecessor) -> None:
        """Wait until all frontends serve. Then let the predecessor stop."""
        await self.frontends.serve(self.notify)
        self._predecessor = None
        predecessor.replace()

    def _change_models(self, change: ModelChange) -> None:
        if self._busy:
            self._models.end(change, "an upgrade or another change of the models runs; try again when it has ended")
        else:
            self._begin(self._models.run(change))

    def _reload_on_hangup(self) -> None:
        """At SIGHUP, processes read keys, certificates and tokens of files again, and this one the models of its settings file."""
        settings = self._settings
        files = (settings.token_file, settings.api_keys_file, settings.admin_keys_file, settings.tls_cert_file)

        def reload() -> None:
            if settings.token_file:
                for group in self.groups.values():
                    group.supervisors["leader"].signal_all(signal.SIGHUP)
            if any(files):  # it would end the others
                for frontends in self._generations:
                    frontends.supervisors["frontend"].signal_all(signal.SIGHUP)
            if settings.models_file is not None:
                self._file_changed = True
                if not self._busy:
                    self._begin(asyncio.sleep(0))

        if any((*files, settings.models_file)):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)

    # -- processes -------------------------------------------------------------------------------------------------------------

    def command(self, role: Role, name: str, values: Values, stack: contextlib.ExitStack) -> tuple[list[str], int]:
        """The command line of a process, and the descriptor of its settings, which it must inherit."""
        fd = int(settings_file(stack, values).rpartition("/")[2])
        return [role, "--name", name, "--settings-json", f"/dev/fd/{fd}"], fd

    def start(self, role: Role, name: str, values: Values, fds: Mapping[str, int], threads: int) -> ChildProcess:
        """See `group.Service`."""
        with contextlib.ExitStack() as stack:
            command, own = self.command(role, name, values, stack)
            environment, inherited = environment_of(threads, self.notify.environment), [*fds.values(), own]
            if self._can_fork:
                title = " ".join(["multiworld", *command])
                return ChildProcess.fork(title, partial(self._program, command), environment, inherited)
            return ChildProcess.spawn([*PROGRAM, *command], environment, inherited)

    def new_group(self, name: str, settings: ServeSettings, stack: contextlib.ExitStack) -> Group:
        """The processes of a further model, not started. Its workers treat those of other groups like other programs.

        Args:
            stack: closes its sockets and files.
        Raises:
            UserError, ModelError: a file is missing, or its join port is in use.
        """
        check_model_files(settings)
        if settings.handler is not None:
            _check_handler(settings.handler)
        workers = sum(group.settings.max_workers for group in self.groups.values()) + settings.max_workers
        cores = memory_file(stack, "cores", ""), 0
        group = Group(settings, self, stack, prefix=f"{name}-", workers=workers, cores=cores, is_new=True)
        if settings.external_workers:
            self._log_external(name, group)
        return group

    def new_frontends(self, groups: Mapping[str, Group], wait_until_ready: tuple[str, ...] | None) -> Frontends:
        """Return new frontends for these models, not started. Their names are unused, so they can run beside the present ones."""
        settings = self._settings
        first = settings.frontends - self.frontends.first if self._generations else 0
        supervisor = Supervisor(
            lambda slot: self.start("frontend", *self._frontend(first + slot, groups, made.wait_until_ready)),
            settings.frontends,
            kind="frontend",
            stop_timeout_s=stop_timeout_s(settings),
            notify=self.notify,
            blocked_timeout_s=blocked_timeout_s(settings),
            on_restart=self.write_restarts,
        )
        made = Frontends(supervisor, first, wait_until_ready)
        self._generations = [*(each for each in self._generations if not each.has_ended), made]
        return made

    def _frontend(
        self, number: int, groups: Mapping[str, Group], wait_until_ready: tuple[str, ...] | None
    ) -> tuple[str, Values, Mapping[str, int], int]:
        """Name, settings, descriptors and threads of a frontend."""
        sockets = {"http_fd": self._http, "metrics_fd": self._admin, "grpc_fd": self._grpc}
        fds = {setting: sock.fileno() for setting, sock in sockets.items() if sock is not None}
        own = {
            "http_shares": self._settings.frontends,
            "wait_until_ready": wait_until_ready,
            "supervisor_metrics_file": self._restarts_file,
            "changes_file": self._changes_file,
            "leader": ",".join(f"{name}={group.leaders}" for name, group in groups.items()),
            "model_settings": {name: self._of_model(group) for name, group in groups.items()},
        }
        values = {**frontend_values(self._settings, number), **own, **fds}
        return f"{NAMES['frontend']}-{number}", values, fds, 1

    @staticmethod
    def _of_model(group: Group) -> Values:
        """The settings of frontends that differ for each model."""
        names = ("handler", "timeout_s", "queue_limit", "recovery_grace_s")
        return {name: getattr(group.settings, name) for name in names}

    def write_restarts(self) -> None:
        """Write the numbers of restarts into a file in memory. The frontends add them to their metrics."""
        restarts: dict[str, Mapping[Role, Mapping[int, int]]] = {
            "": {"frontend": self.frontends.supervisors["frontend"].restarts}
        }
        restarts |= {
            name: {role: each.restarts for role, each in group.supervisors.items()}
            for name, group in self.groups.items()
        }
        with contextlib.suppress(OSError):  # no memory; must not stop any process
            Path(self._restarts_file).write_text(restart_metrics(restarts), encoding="utf-8")

    # -- addresses -------------------------------------------------------------------------------------------------------------

    def _socket(self, host: str, port: int, name: str, *, reserve: bool = False) -> socket.socket:
        key = f"{name} {host}:{port}"
        inherited = None if self._predecessor is None else self._predecessor.socket(key)
        sock = self._stack.enter_context(inherited or bind(host, port, option(name), reserve=reserve))
        self._sockets[key] = sock
        return sock

    def _log_addresses(self) -> None:
        settings = self._settings
        scheme = "http" if settings.tls_cert_file is None else "https"
        host, admin_host = local_host_of(settings.host), local_host_of(settings.admin_host)
        joins = [sock for group in self.groups.values() for sock in group.joins]
        logger.info(
            "listening http=%s://%s:%d metrics=%s://%s:%d/metrics join=%s%s",
            *(scheme, host, self._http.getsockname()[1], scheme, admin_host, self._admin.getsockname()[1]),
            ",".join(f"{settings.join_host}:{sock.getsockname()[1]}" for sock in joins),
            f" grpc={host}:{self._grpc.getsockname()[1]}" if self._grpc else "",
        )
        for name, group in self.groups.items():
            if group.settings.external_workers:
                self._log_external(name, group)

    @staticmethod
    def _log_external(name: str, group: Group) -> None:
        settings, there = group.settings, external_host_of(group.settings.join_host)
        ports = [sock.getsockname()[1] for sock in group.joins]
        each = " ".join(f"--leader {settings.advertised(port) or f'{there}:{port}'}" for port in ports)
        logger.info(
            "waiting for workers of %s; on each of their machines: multiworld worker %s --token-file …", name, each
        )


def restart_metrics(restarts: Mapping[str, Mapping[Role, Mapping[int, int]]]) -> str:
    """The restarts by model, role and slot, in the text format of Prometheus. Frontends have the model ""."""
    lines: dict[str, list[str]] = {}
    for model, of_model in restarts.items():
        for role, of_role in of_model.items():
            name = f"multiworld_{role}_restarts_total"
            head = [f"# HELP {name} Restarts of {role}s by the supervisor.", f"# TYPE {name} counter"]
            label = f'model="{model}",' if model else ""
            lines.setdefault(name, head).extend(
                f'{name}{{{label}slot="{slot}"}} {count}' for slot, count in of_role.items()
            )
    return "\n".join(line for family in lines.values() for line in family) + "\n"
