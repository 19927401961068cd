"""The models of a service, which change while it serves: by commands of the admin port, and by its settings file at SIGHUP.

The leaders and workers of a new model start first, then frontends that know it. These accept connections when the model is ready. Then the
former frontends answer their requests and stop. So clients never see a model that cannot start, and the other models keep their processes.
"""

import asyncio
import contextlib
import json
import logging
import signal
from collections.abc import Collection, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.process import first_of
from multiworld_serving.common.service.model_change import ModelChange
from multiworld_serving.common.service.model_files import path_in
from multiworld_serving.common.settings.serve import OF_MODEL, ServeSettings
from multiworld_serving.models.errors import ModelError
from multiworld_serving.server.supervisor.checks import Table, check_model, checked
from multiworld_serving.server.supervisor.group import Group
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
)
from multiworld_serving.server.supervisor.supervisor import ProcessSet

logger = logging.getLogger(__name__)

_KEPT_OUTCOMES = 64
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


class Models:
    """Owns the leaders and workers of each model, and the frontends. Changes the models, one at a time.

    Args:
        models: the settings of each model by its name.
        fds: the descriptors of the frontends' listening sockets, by setting.
        stack: closes sockets and files.
        changes: those of commands since the settings were read: the table of an added model, None for a removed one.
        wait_until_ready: the first frontends accept connections when these models are ready; None: at once.

    Attributes:
        groups: the leaders and workers of each model.
        frontends: the current frontends, which accept requests.
    """

    def __init__(
        self,
        settings: ServeSettings,
        models: Mapping[str, ServeSettings],
        starter: Starter,
        fds: Mapping[str, int],
        stack: contextlib.ExitStack,
        *,
        changes: dict[str, Table | None],
        wait_until_ready: Collection[str] | None = None,
    ) -> None:
        self.changes = changes
        self.groups: dict[str, Group] = {}
        self._settings = settings
        self._starter = starter
        self._fds = fds
        self._restarts_file = memory_file(stack, "metrics", "")
        self._failing_file = memory_file(stack, "failing", "")
        self._outcomes_file = memory_file(stack, "changes", "{}")
        self._outcomes: dict[str, str] = {}
        """The result of each change by its id: why it was refused, or an empty text if it was made."""
        tables: dict[str, Table | None] = {**{table["name"]: table for table in settings.models}, **changes}
        self._given = {name: settings.group_of(table) for name, table in tables.items() if table is not None}
        """The settings of each model that has a table, as given."""
        self._generations: list[Frontends] = []
        workers = sum(each.max_workers for each in models.values())
        for name, each in models.items():
            prefix = f"{name}-" if len(models) > 1 else ""
            self.groups[name] = Group(each, starter, stack, prefix=prefix, workers=workers)
        self.frontends = self._new_frontends(self.groups, wait_until_ready)
        self._initial: list[ProcessSet] = [*self.groups.values(), self.frontends]
        starter.on_restart = self._write_state

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start all processes."""
        self._tasks = tasks
        for each in self._initial:
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
        error: str = await first_of(*(each.cannot_start() for each in self._initial))
        return error

    def signal(self, role: Role, signum: signal.Signals) -> None:
        """Send a signal to all leaders, or to all frontends."""
        for each in self._generations if role == "frontend" else self.groups.values():
            each.supervisors[role].signal_all(signum)

    async def run(self, change: ModelChange) -> None:
        """Make a change of a command."""
        self.end(change, await self._attempt(change.name, self._command(change)))

    def end(self, change: ModelChange, refused: str = "") -> None:
        """Write the outcome of a change for those who have asked for it."""
        self._outcomes = dict([*self._outcomes.items(), (change.id, refused)][-_KEPT_OUTCOMES:])
        with contextlib.suppress(OSError):  # no memory; must not stop any process
            Path(self._outcomes_file).write_text(json.dumps(self._outcomes), encoding="utf-8")

    async def read_file(self) -> None:
        """Have the models that the settings file has now, if all of it is valid. Commands since then are forgotten."""
        assert self._settings.reload is not None, "the service was started with tables [[models]]"
        file = self._settings.models_file
        try:
            fresh = self._settings.reload().with_token()
            if not fresh.models:
                raise UserError(f"{file} has no tables [[models]]")
            common = self._settings.model_copy(update={name: getattr(fresh, name) for name in OF_MODEL})
            models = checked([common.group_of(table) for table in fresh.models])
        except _REFUSALS as error:
            logger.error("the models are unchanged: %s", error)  # noqa: TRY400 - the traceback adds nothing
            return
        self.changes.clear()
        if models == {name: self._given[name] for name in self.groups}:
            logger.info("models unchanged")
        for name in dict.fromkeys((*models, *self.groups)):
            settings = models.get(name)
            if settings is None or name not in self.groups:
                await self._attempt(name, self._set(name, settings, START_TIMEOUT_S))
            elif settings != self._given[name]:
                logger.warning("the settings of model %s changed in %s; send SIGUSR2 to apply them", name, file)

    async def _command(self, change: ModelChange) -> None:
        table = None if change.action == "remove" else self._allowed(change)
        settings = None if table is None else self._settings.group_of(table)
        await self._set(change.name, settings, change.timeout_s)
        self.changes.pop(change.name, None)  # their order is that of the models
        self.changes[change.name] = table

    def _allowed(self, change: ModelChange) -> Table:
        """The table of a model that a command adds. Raises UserError or ModelError for files outside --weights-dir."""
        weights, source = change.settings.get("weights", ""), change.source
        if _is_path(weights) or not change.settings.keys().isdisjoint(("handler", "weights_dir")):
            raise UserError(
                "weights, weights_dir and handler name files: write the model into the settings file and send SIGHUP"
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
        groups = self.groups
        if settings is None:
            kept = {each: group for each, group in groups.items() if each != name}
            if name not in groups:
                raise UserError(f"there is no model {name!r}; the models are {', '.join(groups)}")
            if not kept:
                raise UserError(f"{name!r} is the last model: stop the service instead")
            await self._replace_frontends(kept, (), timeout_s)
            await groups.pop(name).stop()
            self._write_state()
            logger.info("removed model=%s", name)
            return
        if name in groups:
            raise UserError(f"there is a model {name!r} already")
        check_model(settings)
        workers = sum(group.settings.max_workers for group in groups.values()) + settings.max_workers
        with contextlib.ExitStack() as stack:
            group = Group(settings, self._starter, stack, prefix=f"{name}-", workers=workers, is_new=True)
            group.start(self._tasks, stack.pop_all())
        group.log_external(name)
        try:
            await self._replace_frontends({**groups, name: group}, (name,), timeout_s, group)
        except BaseException:
            await group.stop()
            raise
        groups[name], self._given[name] = group, settings
        self._write_state()
        logger.info("added model=%s", name)

    def _new_frontends(self, groups: Mapping[str, Group], wait_until_ready: Collection[str] | None) -> Frontends:
        """New frontends for these models, not started. Their names are unused, so they can run beside the present ones."""
        settings = self._settings
        values: Values = {
            "http_shares": settings.frontends,
            "wait_until_ready": None if wait_until_ready is None else tuple(wait_until_ready),
            "supervisor_metrics_file": self._restarts_file,
            "failing_file": self._failing_file,
            "changes_file": self._outcomes_file,
            "leader": ",".join(f"{name}={group.leaders}" for name, group in groups.items()),
            "model_settings": model_values({name: group.settings for name, group in groups.items()}),
        }
        first = settings.frontends - self.frontends.first if self._generations else 0
        self._generations.append(Frontends(settings, self._starter, values, self._fds, first))
        return self._generations[-1]

    async def _replace_frontends(
        self, groups: Mapping[str, Group], wait_until_ready: Collection[str], timeout_s: float, *new: Group
    ) -> None:
        """Start frontends, and stop the former ones when these serve. Raises UserError if they do not, or a new group fails."""
        fresh = stopped = self._new_frontends(groups, wait_until_ready)
        fresh.start(self._tasks)
        error: str | None = f"it was not ready within {timeout_s:g} s; see the log of the service"
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    error = await first_of(fresh.serve(), *(each.cannot_start() for each in (fresh, *new)))
            if error is not None:
                raise UserError(error)
            stopped, self.frontends = self.frontends, fresh
        finally:
            await stopped.stop()
            self._generations.remove(stopped)

    def _write_state(self) -> None:
        """Write the numbers of restarts, which frontends add to their metrics, and the processes that fail, for their status."""
        sets: dict[str, ProcessSet] = {"": self.frontends, **self.groups}
        restarts = [
            (name, role, each.restarts) for name, found in sets.items() for role, each in found.supervisors.items()
        ]
        failing = [text for found in sets.values() for each in found.supervisors.values() for text in each.failing]
        with contextlib.suppress(OSError):  # no memory; must not stop any process
            Path(self._restarts_file).write_text(restart_metrics(restarts), encoding="utf-8")
            Path(self._failing_file).write_text("\n".join(failing), encoding="utf-8")


def _is_path(text: str) -> bool:
    return "/" in text or Path(text).suffix != ""


def restart_metrics(restarts: Iterable[tuple[str, str, Mapping[int, int]]]) -> str:
    """The restarts of each model, role and slot in Prometheus' text format, which `merge_metrics` orders. Frontends have the model ""."""
    text = ""
    for model, role, of_slots in restarts:
        name, label = f"multiworld_{role}_restarts_total", f'model="{model}",' if model else ""
        text += f"# HELP {name} Restarts of {role}s by the supervisor.\n# TYPE {name} counter\n"
        text += "".join(f'{name}{{{label}slot="{slot}"}} {count}\n' for slot, count in of_slots.items())
    return text
