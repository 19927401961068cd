"""`multiworld serve`: starts leaders, frontends and local workers, restarts those that end, and stops them in order.

This process carries no request. It imports what the others need and forks them, so that a restart takes milliseconds. It opens all
listening sockets and passes them on, so a restarted process continues on the same port, and clients that connect meanwhile wait instead
of being refused. When it stops, it refuses new connections. On request, a new `multiworld serve` takes its place; see `upgrade.py`.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.process import first_of, notify_systemd, on_stop_signal, raise_descriptor_limit
from multiworld_serving.common.config.tokens import new_token
from multiworld_serving.common.http.listener import stop_listening
from multiworld_serving.common.settings.serve import ServeSettings
from multiworld_serving.server.supervisor.child_process import reap_adopted
from multiworld_serving.server.supervisor.forwarder import SIGNALS
from multiworld_serving.server.supervisor.group import local_host_of
from multiworld_serving.server.supervisor.models import Models
from multiworld_serving.server.supervisor.notify import NotifyListener, unix_socket
from multiworld_serving.server.supervisor.programs import Starter, import_programs
from multiworld_serving.server.supervisor.upgrade import Upgrade

logger = logging.getLogger(__name__)

_REAP_S = 1.0
"""Interval at which processes of ended parents are collected."""


def run(settings: ServeSettings, program: Callable[[Sequence[str]], object]) -> int:
    """Run the service until SIGTERM or Ctrl-C. Returns the exit status.

    Args:
        program: see `Starter`.
    Raises:
        UserError, models.ModelError: a port is in use, a file is missing, or the device does not exist. No process was started.
    """
    settings = settings.model_copy(update={"local_token": new_token()})
    settings.accepted_secrets  # noqa: B018 - raises if the token file is invalid
    with contextlib.ExitStack() as stack:
        upgrade = Upgrade(stack)
        raise_descriptor_limit()
        service = Service(settings, stack, program, upgrade)
        service.import_programs()
        if error := asyncio.run(service.run()):
            raise UserError(f"the service cannot start: {error}")
    return 0


class Service:
    """Opens the listening sockets, starts the processes, and acts on signals: stop, upgrade, or read files again.

    Args:
        stack: closes the sockets and files.
        program: see `Starter`.

    Attributes:
        models: the processes.
    """

    def __init__(
        self,
        settings: ServeSettings,
        stack: contextlib.ExitStack,
        program: Callable[[Sequence[str]], object],
        upgrade: Upgrade,
    ) -> None:
        self._settings = settings
        self._upgrade = upgrade
        self._stop = asyncio.Event()
        self._changes: set[asyncio.Task[object]] = set()
        """Upgrades and changes of the models that run or wait."""
        self._requests, name = unix_socket(socket.SOCK_STREAM)
        stack.enter_context(self._requests)
        self._sockets = {
            "http_fd": upgrade.listen("http_port", settings.host, settings.http_port),
            "admin_fd": upgrade.listen("admin_port", settings.admin_address, settings.admin_port),
        }
        if settings.grpc_port is not None:
            self._sockets["grpc_fd"] = upgrade.listen("grpc_port", settings.host, settings.grpc_port, reserve=True)
        self._starter = Starter(stack.enter_context(NotifyListener()), program)
        self.models = Models(
            settings,
            self._starter,
            {name: sock.fileno() for name, sock in self._sockets.items()},
            stack,
            changes=upgrade.changes,
            requests=name,
            replaces=upgrade.replaces,
            upgrade=self._replace_this,
        )

    def import_programs(self) -> None:
        """Import what the processes need. A signal meanwhile ends this process: nothing runs yet."""
        self._log_addresses()
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: os._exit(0))
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # there is nothing to upgrade yet
        if not import_programs(max(group.threads for group in self.models.groups.values())):
            logger.warning("an import has started a thread: processes start as new programs, which takes longer")

    async def run(self) -> str:
        """Run all processes until a signal, or until they cannot start. Returns why they cannot; empty after a signal."""
        on_stop_signal(self._begin_stop)
        requests = await asyncio.start_unix_server(
            lambda *streams: self._begin(self.models.answer(*streams)), sock=self._requests
        )
        with self._starter.notify.receiving():
            self._reload_on_hangup()
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, lambda: self._begin(self._replace_this()))
            async with asyncio.TaskGroup() as tasks:
                self.models.start(tasks)
                adopted = tasks.create_task(_reap_adopted())
                async with notify_systemd(lambda: self.models.frontends.supervisors["frontend"].is_ready):
                    if self._upgrade.replaces:
                        self._begin(self._replace())
                    error = await first_of(self._stopped(), self.models.cannot_start())
                requests.close()
                for each in self._changes:
                    each.cancel()
                await asyncio.gather(*self._changes, return_exceptions=True)
                await self._stop_processes()
                adopted.cancel()
            logger.info("stopped")
            self._upgrade.become_forwarder()
        return error

    async def _stopped(self) -> str:
        await self._stop.wait()
        return ""

    async def _stop_processes(self) -> None:
        """Refuse new connections, then stop all processes. During an upgrade, another service uses the sockets."""
        is_sole = self._upgrade.successor is None and not self._upgrade.replaces
        if is_sole:
            await stop_listening(self._sockets["http_fd"])
        await self.models.stop_frontends()  # the admin port serves until then
        if is_sole:
            await stop_listening(self._sockets["admin_fd"])
        await self.models.stop()

    def _begin_stop(self) -> None:
        logger.info("stopping; a second signal ends all processes at once")
        self._stop.set()

    def _begin(self, work: Coroutine[Any, Any, object]) -> None:
        self._changes.add(task := asyncio.create_task(work))
        task.add_done_callback(self._changes.discard)

    async def _replace(self) -> None:
        """Wait until all frontends serve. Then let the predecessor stop."""
        await self.models.frontends.serve()
        self._upgrade.replace()

    async def _replace_this(self) -> str:
        """Start a new service. When it serves, it gets all signals, and this one stops. Returns why this one continues."""
        try:
            await self._start_successor()
        except UserError as error:
            logger.error("no upgrade, and this service continues: %s", error)  # noqa: TRY400 - the traceback adds nothing
            return str(error)
        return ""

    async def _start_successor(self) -> None:
        turn, loop = self.models.turn, asyncio.get_running_loop()
        if any(group.is_reachable for group in self.models.groups.values()):
            raise UserError("workers of other machines may join the leaders; restart the programs one at a time")
        if turn.locked():
            raise UserError("the last upgrade, or a change of the models, has not ended")
        async with turn:
            successor = await self._upgrade.start_successor(self.models.changes)
        await turn.acquire()  # after each SIGHUP that has arrived meanwhile; nothing changes here any more
        logger.info("upgraded: the new supervisor serves pid=%d", successor.pid)
        for signum in SIGNALS:
            loop.add_signal_handler(signum, successor.send, signum)
        os.environ.pop("NOTIFY_SOCKET", None)  # for systemd, the service does not stop
        self._stop.set()

    async def _reload(self) -> None:
        """Read the models of the settings file again. After an upgrade, the new service reads its files again."""
        async with self.models.turn:
            if self._upgrade.successor is not None:
                self._upgrade.successor.send(signal.SIGHUP)
            elif self._settings.models_file is not None:
                await self.models.read_file()

    def _reload_on_hangup(self) -> None:
        """At SIGHUP, processes read keys, certificates and tokens of files again, and this one the models of its settings file."""
        settings = self._settings
        files = (settings.token_file, settings.api_keys_file, settings.admin_keys_file, settings.tls_cert_file)

        def reload() -> None:
            if settings.token_file:
                self.models.signal("leader", signal.SIGHUP)
            if any(files):  # it would end the others
                self.models.signal("frontend", signal.SIGHUP)
            self._begin(self._reload())

        if any((*files, settings.models_file)):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)

    def _log_addresses(self) -> None:
        settings = self._settings
        scheme = "http" if settings.tls_cert_file is None else "https"
        host, admin_host = local_host_of(settings.host), local_host_of(settings.admin_address)
        ports = {name: sock.getsockname()[1] for name, sock in self._sockets.items()}
        joins = [sock for group in self.models.groups.values() for sock in group.joins]
        logger.info(
            "listening http=%s://%s:%d metrics=%s://%s:%d/metrics join=%s%s",
            *(scheme, host, ports["http_fd"], scheme, admin_host, ports["admin_fd"]),
            ",".join(f"{settings.join_host}:{sock.getsockname()[1]}" for sock in joins),
            f" grpc={host}:{ports['grpc_fd']}" if "grpc_fd" in ports else "",
        )
        for name, group in self.models.groups.items():
            group.log_external(name)


async def _reap_adopted() -> None:
    while True:
        await asyncio.sleep(_REAP_S)
        reap_adopted()
