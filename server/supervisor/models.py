"""The models of a service, which change while it serves: by commands of the admin port, and by its settings file at SIGHUP.

The leaders and workers of a new model start first, then frontends that know it. These accept connections when the model is ready. Then the
former frontends answer their requests and stop. So clients never see a model that cannot start, and the other models keep their processes.
The frontend that has requested the change stops last, when it has the reply.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.process import first_of
from multiworld_serving.common.service.model_change import ModelChange
from multiworld_serving.common.service.model_files import (
    available_weights,
    path_in,
    pipeline_source,
    served_name,
    with_description,
)
from multiworld_serving.common.service.model_versions import model_and_version, versions_of
from multiworld_serving.common.settings.serve import OF_MODEL, ServeSettings
from multiworld_serving.models.errors import ModelError
from multiworld_serving.models.stages.pipeline import describe_meanwhile
from multiworld_serving.server.supervisor.group import Group
from multiworld_serving.server.supervisor.model_settings import checked, described
from multiworld_serving.server.supervisor.notify import CREDENTIALS
from multiworld_serving.server.supervisor.programs import (
    START_TIMEOUT_S,
    Process,
    Role,
    Starter,
    Values,
    frontend_values,
    memory_file,
    model_values,
    timeouts_s,
    write_file,
)
from multiworld_serving.server.supervisor.shares import Shares, initial_shares
from multiworld_serving.server.supervisor.supervisor import ProcessSet, restart_metrics

logger = logging.getLogger(__name__)

Table = Mapping[str, Any]
"""A table [[models]]."""
_REFUSALS = (UserError, ModelError, ValueError, OSError)
"""Errors of a change of the models."""


class Frontends(ProcessSet):
    """Frontends that know the same models.

    Args:
        values: settings that differ from those of `multiworld serve`.
        fds: the descriptors of their listening sockets, by setting.
        first: number in the name of the first one.
    """

    def __init__(
        self, settings: ServeSettings, starter: Starter, values: Values, fds: Mapping[str, int], first: int
    ) -> None:
        self.first = first
        self._values = values
        self._notify = starter.notify

        def process(slot: int) -> Process:
            number = first + slot
            return Process(f"frontend-{number}", {**frontend_values(settings, number), **self._values, **fds}, fds)

        timeouts = timeouts_s(settings, "frontend")
        super().__init__({"frontend": starter.supervisor("frontend", settings.frontends, process, timeouts)})

    async def serve(self) -> None:
        """Wait until all of them accept requests. One that restarts later accepts them before all models are ready."""
        supervisor, notify = self.supervisors["frontend"], self._notify
        while len(pids := supervisor.pids) < supervisor.count or not all(map(notify.heard, pids.values())):
            notify.first_heard.clear()
            await notify.first_heard.wait()
        self._values["wait_until_ready"] = None

    async def stop_all_but(self, pid: int) -> None:
        """Stop all of them except this process. Returns when they have ended."""
        supervisor = self.supervisors["frontend"]
        others = [slot for slot in supervisor.restarts if supervisor.pids.get(slot) != pid]
        await asyncio.gather(*map(supervisor.remove, others))


class Models:
    """Owns the leaders and workers of each model, and the frontends. Changes the models, one at a time.

    Args:
        fds: the descriptors of the frontends' listening sockets, by setting.
        stack: closes sockets and files.
        changes: of commands since the settings were read: the table of an added model, the share of one of the settings, None if removed.
        requests: the Unix socket at which frontends request changes.
        replaces: the processes of another service use the same sockets, until those of this one are ready.
        upgrade: has a new service take the place of this one; returns why it does not.
    Raises:
        UserError, ModelError: the settings of a model are invalid, a file is missing, or a model cannot be exported.

    Attributes:
        turn: held by a change of the models, or by an upgrade. There is one at a time.
        groups: the leaders and workers of each model, or of each version of it.
        frontends: the current frontends, which accept requests.
    """

    def __init__(
        self,
        settings: ServeSettings,
        starter: Starter,
        fds: Mapping[str, int],
        stack: contextlib.ExitStack,
        *,
        changes: dict[str, Table | None],
        requests: str,
        replaces: bool,
        upgrade: Callable[[], Awaitable[str]],
    ) -> None:
        self.changes = changes
        self._upgrade = upgrade
        self.groups: dict[str, Group] = {}
        self.turn = asyncio.Lock()
        self._settings = settings
        self._starter = starter
        self._fds = fds
        self._restarts_file, self._failing_file = (memory_file(stack, name, "") for name in ("metrics", "failing"))
        self._requests = requests
        self._requester: tuple[int, asyncio.StreamWriter] | None = None
        """The frontend that has requested the present change: its process id, and the connection for the reply."""
        kept = [(each, changes.get(served_name(each), {})) for each in settings.groups]
        models = checked(
            [
                *(each.model_copy(update=dict(own)) for each, own in kept if own is not None and "source" not in own),
                *(settings.group_of(table) for table in changes.values() if table and "source" in table),
            ]
        )
        self._shares = Shares(memory_file(stack, "shares", ""), {name: each.share for name, each in models.items()})
        self._given = {name: _lasting(each) for name, each in models.items()}
        """The settings of each model as given."""
        if replaces:  # the leaders of the other service use their ports, and no worker is on another machine
            models = self._given
        self._generations: list[Frontends] = []
        workers = sum(each.max_workers for each in models.values())
        for name, each in models.items():
            prefix = _prefix(name) if len(models) > 1 else ""
            own = described(each.model_copy(update={"weights": available_weights(each)}))
            first = sum(group.settings.max_workers for group in self.groups.values())
            self.groups[name] = Group(own, starter, stack, prefix=prefix, workers=workers, first_slot=first)
        self.frontends = self._new_frontends(self.groups, models if replaces else None)
        starter.on_restart = self._write_state

    @property
    def _sets(self) -> dict[str, ProcessSet]:
        """The groups by model, and the frontends."""
        return {**self.groups, "": self.frontends}

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start all processes."""
        self._tasks = tasks
        for each in self._sets.values():
            each.start(tasks)
        self._write_state()

    async def stop_frontends(self) -> None:
        """Stop the frontends. They answer their requests, which need leaders and workers."""
        await asyncio.gather(*(each.stop() for each in self._generations))

    async def stop(self) -> None:
        """Stop all processes, the frontends first."""
        await self.stop_frontends()
        await asyncio.gather(*(each.stop() for each in self.groups.values()))

    async def cannot_start(self) -> str:
        """Wait until processes with which the service has started cannot start. Returns why."""
        error: str = await first_of(*(each.cannot_start() for each in self._sets.values()))
        return error

    def signal(self, role: Role, signum: signal.Signals) -> None:
        """Send a signal to all leaders, or to all frontends."""
        for each in self._generations if role == "frontend" else self.groups.values():
            each.supervisors[role].signal_all(signum)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Make the change that a frontend requests. The reply is why nothing has changed, or an empty text."""
        with contextlib.closing(writer):
            sock: socket.socket = writer.get_extra_info("socket")
            pid, uid, _ = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
            if uid != os.getuid():
                return
            change = msgspec.json.decode(await reader.readline(), type=ModelChange)
            if change.action == "upgrade":
                writer.write(msgspec.json.encode(await self._upgrade()))
                return
            async with self.turn:
                await asyncio.sleep(0)  # reads the end of a connection that came while this process was frozen
                if reader.at_eof():  # the frontend waits no longer
                    return
                self._requester = pid, writer
                refused = await self._attempt(change.name, self._command(change))
                if refused or change.action == "share":
                    writer.write(msgspec.json.encode(refused))

    async def read_file(self) -> None:
        """Have the models that the settings file has now, if all of it is valid. Commands since then are forgotten."""
        self._requester = None
        assert self._settings.reload is not None, "the service was started with tables [[models]]"
        file = self._settings.models_file
        try:
            fresh = self._settings.reload().with_token()
            if not fresh.models:
                raise UserError(f"{file} has no tables [[models]]")
            common = self._settings.model_copy(update={name: getattr(fresh, name) for name in OF_MODEL})
            named = checked([common.group_of(table) for table in fresh.models])
            shares = initial_shares({name: each.share for name, each in named.items()})
        except _REFUSALS as error:
            logger.error("the models are unchanged: %s", error)  # noqa: TRY400 - the traceback adds nothing
            return
        models = {name: _lasting(each) for name, each in named.items()}
        if models == {name: self._given[name] for name in self.groups} and shares == self._shares.now:
            logger.info("models unchanged")
        for name in dict.fromkeys((*models, *self.groups)):
            settings = models.get(name)
            if settings is None or name not in self.groups:
                await self._attempt(name, self._set(name, settings, START_TIMEOUT_S))
            elif settings != self._given[name]:
                logger.warning("the settings of model %s changed in %s; `multiworld upgrade` applies them", name, file)
        if self.groups.keys() == shares.keys():
            self._shares.set(shares)
        self.changes.clear()

    async def _command(self, change: ModelChange) -> None:
        if change.action == "share":
            given = self._shares.parsed(change.name, change.shares)
            self._shares.set(self._shares.divided(change.name, self.groups, given))
        else:
            adds = change.action == "add"
            name, table = (change.name, self._allowed(change)) if adds else (Shares.key(change.name, self.groups), None)
            settings = None if table is None else self._settings.group_of(table)
            await self._set(name, settings, change.timeout_s)
            self.changes.pop(name, None)  # their order is that of the models
            self.changes[name] = table
        for each in versions_of(model_and_version(change.name)[0], self.groups):
            self.changes[each] = {**(self.changes.get(each) or {}), "share": self._shares.now[each]}

    def _allowed(self, change: ModelChange) -> Table:
        """The table of a model that a command adds. Raises UserError or ModelError for files outside --weights-dir."""
        weights, source = change.settings.get("weights", ""), change.source
        if _is_path(weights) or not change.settings.keys().isdisjoint(("stage_settings", "weights_dir")):
            raise UserError(
                "weights, weights_dir and stage_settings cannot be sent: write the model into the settings file and send SIGHUP"
            )
        if _is_path(source) or Path(source).exists():  # a file or folder where the service runs
            source = str(path_in(self._settings.weights_dir, source))
        return {"name": change.name, "source": source, **change.settings}

    @staticmethod
    async def _attempt(name: str, change: Coroutine[Any, Any, None]) -> str:
        """Make a change. Returns why the model is unchanged; empty if it has changed."""
        try:
            await change
        except _REFUSALS as error:
            logger.error("model %r is unchanged: %s", name, error)  # noqa: TRY400
            return str(error)
        return ""

    async def _set(self, name: str, settings: ServeSettings | None, timeout_s: float) -> None:
        """Add a model, or remove it if there are no settings. Raises UserError, ModelError, ValueError or OSError if that is impossible."""
        if settings is None:
            if name not in self.groups:
                raise UserError(f"there is no model {name!r}; the models are {', '.join(self.groups)}")
            groups = {each: group for each, group in self.groups.items() if each != name}
            if not groups:
                raise UserError(f"{name!r} is the last model: stop the service instead")
            shares = self._shares.divided(name, groups, {})
        else:
            if model_and_version(name) in map(model_and_version, self.groups):
                raise UserError(f"there is a model {name!r} already")
            given = {} if settings.share is None else {name: settings.share}
            shares = self._shares.divided(name, [*self.groups, name], given)
            self._given[name] = _lasting(settings)
            if (pipeline := pipeline_source(settings)) is not None:
                settings = with_description(settings, await describe_meanwhile(pipeline))
            workers = sum(group.settings.max_workers for group in self.groups.values()) + settings.max_workers
            with contextlib.ExitStack() as stack:
                group = Group(settings, self._starter, stack, prefix=_prefix(name), workers=workers, is_new=True)
                group.start(self._tasks, stack.pop_all())
            group.log_external(name)
            groups = {**self.groups, name: group}
        with self._shares.unless_failed(shares):
            await self._serve(groups, timeout_s)
        for each in groups.values():
            each.is_new = False
        logger.info("%s model=%s", "removed" if settings is None else "added", name)

    def _new_frontends(self, groups: Mapping[str, Group], wait_until_ready: Collection[str] | None) -> Frontends:
        """New frontends for these models, not started. Their names are unused, so they can run beside the present ones."""
        settings = self._settings
        values: Values = {
            "http_shares": settings.frontends,
            "wait_until_ready": None if wait_until_ready is None else tuple(wait_until_ready),
            "supervisor_metrics_file": self._restarts_file,
            "failing_file": self._failing_file,
            "shares_file": self._shares.file,
            "supervisor": self._requests,
            "leader": ",".join(f"{name}={group.leaders}" for name, group in groups.items()),
            "model_settings": model_values({name: group.settings for name, group in groups.items()}),
        }
        first = settings.frontends - self.frontends.first if self._generations else 0
        self._generations.append(Frontends(settings, self._starter, values, self._fds, first))
        return self._generations[-1]

    async def _serve(self, groups: Mapping[str, Group], timeout_s: float) -> None:
        """Start frontends that know these groups. When these serve, stop the former frontends, and then the other groups.

        Raises:
            UserError: the new frontends do not serve in time, or a new group fails. These are stopped.
        """
        fresh = self._new_frontends(groups, groups.keys() - self.groups.keys())
        fresh.start(self._tasks)
        stopping: list[ProcessSet] = [fresh, *(group for name, group in groups.items() if name not in self.groups)]
        error: str | None = f"it was not ready within {timeout_s:g} s; see the log of the service"
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    error = await first_of(fresh.serve(), *(each.cannot_start() for each in stopping))
            if error is not None:
                raise UserError(error)
            former, self.frontends = self.frontends, fresh
            stopping = [former, *(group for name, group in self.groups.items() if name not in groups)]
            self.groups |= groups
            if self._requester is not None:
                pid, writer = self._requester
                await former.stop_all_but(pid)
                writer.write(msgspec.json.encode(""))
                writer.close()
        finally:
            for each in stopping:
                await each.stop()
            self._generations = [self.frontends]
            self.groups = {name: group for name, group in self.groups.items() if group not in stopping}
            self._write_state()

    def _write_state(self) -> None:
        """Write the numbers of restarts, which frontends add to their metrics, and the processes that fail, for their status."""
        found = [(name, role, each) for name, of in self._sets.items() for role, each in of.supervisors.items()]
        restarts = [(name, role, each.restarts) for name, role, each in found]
        failing = [text for _, _, each in found for text in each.failing]
        write_file(self._restarts_file, restart_metrics(restarts))
        write_file(self._failing_file, "\n".join(failing))


def _lasting(settings: ServeSettings) -> ServeSettings:
    """The settings of a model that need an upgrade to change. The first model of a service has a join port."""
    return settings.model_copy(update={"join_port": 0, "share": None})


def _prefix(name: str) -> str:
    """First part of the names of a model's processes, which have no @."""
    return name.replace("@", ".") + "-"


def _is_path(text: str) -> bool:
    return "/" in text or Path(text).suffix != ""
