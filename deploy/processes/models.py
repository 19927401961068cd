"""The models of a service change while it serves: by commands of the admin port, and by its settings file at SIGHUP.

The leaders and workers of a new model start first, then frontends that know it. These accept connections when the model is ready. Then the
former frontends answer their requests and stop. So clients never see a model that cannot start, and the other models keep their processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.sources import tables_of_models
from multiworld_serving.deploy.processes.notify import NotifyListener
from multiworld_serving.deploy.processes.supervisor import ProcessSet, Supervisor
from multiworld_serving.models.errors import ModelError
from multiworld_serving.server.model_change import ModelChange
from multiworld_serving.server.settings import ServeSettings

if TYPE_CHECKING:  # it imports this module
    from multiworld_serving.deploy.processes.service import _Service

logger = logging.getLogger(__name__)

_TIMEOUT_S = 900.0
"""Longest start of a model of the settings file: enough to export a large one."""
_KEPT_OUTCOMES = 64
Table = Mapping[str, Any]
"""A table [[models]]."""


class Frontends(ProcessSet):
    """Frontends that know the same models.

    Attributes:
        first: number in the name of the first one.
        wait_until_ready: see `FrontendSettings`.
    """

    def __init__(self, supervisor: Supervisor, first: int, wait_until_ready: tuple[str, ...] | None) -> None:
        super().__init__({"frontend": supervisor})
        self.first = first
        self.wait_until_ready = wait_until_ready

    async def serve(self, notify: NotifyListener) -> None:
        """Wait until all of them accept requests. One that restarts later accepts them before all models are ready."""
        supervisor = self.supervisors["frontend"]
        while len(pids := supervisor.pids) < supervisor.count or not all(map(notify.heard, pids.values())):
            notify.first_heard.clear()
            await notify.first_heard.wait()
        self.wait_until_ready = None


class Models:
    """Changes the models of a service, one at a time.

    Args:
        changes: those of commands since the settings were read: the table of an added model, None for a removed one.
        outcomes: a JSON file with the result of each change by its id: why it was refused, or an empty text if it was made.
    """

    def __init__(
        self, settings: ServeSettings, service: _Service, changes: dict[str, Table | None], outcomes: Path
    ) -> None:
        self.changes = changes
        self._settings = settings
        self._service = service
        self._file = outcomes
        self._outcomes: dict[str, str] = {}
        self._tables: dict[str, Table] = {table["name"]: table for table in settings.models}

    async def run(self, change: ModelChange) -> None:
        """Make a change of a command."""
        self.end(change, await self._attempt(change.name, self._command(change)))

    def end(self, change: ModelChange, refused: str = "") -> None:
        """Write the outcome of a change for those who have asked for it."""
        self._outcomes = dict([*self._outcomes.items(), (change.id, refused)][-_KEPT_OUTCOMES:])
        with contextlib.suppress(OSError):  # no memory; must not stop any process
            self._file.write_text(json.dumps(self._outcomes), encoding="utf-8")

    async def read_file(self) -> None:
        """Have the models that the settings file has now. Commands since then are forgotten."""
        assert self._settings.models_file is not None, "the service was started with tables [[models]]"
        try:
            tables = {str(table.get("name")): table for table in tables_of_models(self._settings.models_file)}
        except UserError as error:
            logger.error("the models are unchanged: %s", error)  # noqa: TRY400 - the traceback adds nothing
            return
        self.changes.clear()
        served = list(self._service.groups)
        for name, table in tables.items():
            if name not in served:
                await self._attempt(name, self._set(name, table, _TIMEOUT_S))
            elif table != self._tables.get(name):
                logger.warning("model %s: SIGUSR2 applies its other settings, or remove and add it", name)
        for name in served:
            if name not in tables:
                await self._attempt(name, self._set(name, None, _TIMEOUT_S))

    async def _command(self, change: ModelChange) -> None:
        table = None if change.action == "remove" else self._allowed(change)
        await self._set(change.name, table, change.timeout_s)
        self.changes[change.name] = table

    def _allowed(self, change: ModelChange) -> Table:
        """The table of a model that a command adds. Raises UserError or ModelError for files outside --weights-dir."""
        from multiworld_serving.server.versions.model_source import path_in  # noqa: PLC0415 - imports torch

        weights, source = change.settings.get("weights", ""), change.source
        if _is_path(weights) or not change.settings.keys().isdisjoint(("handler", "weights_dir")):
            raise UserError(
                "weights, weights_dir and handler name files: write the model into the settings file and send SIGHUP"
            )
        if _is_path(source):
            source = str(path_in(self._settings.weights_dir, source))
        return {"name": change.name, "source": source, **change.settings}

    @staticmethod
    async def _attempt(name: str, change: Coroutine[Any, Any, None]) -> str:
        """Make a change. Returns why the model is unchanged; empty if it has changed."""
        try:
            await change
        except (UserError, ModelError, ValueError, OSError) as error:
            logger.error("model %r is unchanged: %s", name, error)  # noqa: TRY400
            return str(error)
        return ""

    async def _set(self, name: str, table: Table | None, timeout_s: float) -> None:
        """Add a model, or remove it if there is no table. Raises UserError, ModelError, ValueError or OSError if that is not possible."""
        service, groups = self._service, self._service.groups
        if table is None:
            kept = {each: group for each, group in groups.items() if each != name}
            if name not in groups:
                raise UserError(f"there is no model {name!r}; the models are {', '.join(groups)}")
            if not kept:
                raise UserError(f"{name!r} is the last model: stop the service instead")
            await self._replace_frontends(service.new_frontends(kept, ()), timeout_s)
            await groups.pop(name).stop()
            logger.info("removed model=%s", name)
            return
        if name in groups:
            raise UserError(f"there is a model {name!r} already")
        with contextlib.ExitStack() as stack:
            group = service.new_group(name, self._settings.group_of(table), stack)
            group.start(service.tasks, stack.pop_all())
        try:
            await self._replace_frontends(service.new_frontends({**groups, name: group}, (name,)), timeout_s, group)
        except BaseException:
            await group.stop()
            raise
        groups[name], self._tables[name] = group, table
        logger.info("added model=%s", name)

    async def _replace_frontends(self, fresh: Frontends, timeout_s: float, *groups: ProcessSet) -> None:
        """Start these frontends, and stop the former ones when they serve. Raises UserError if they do not, or a group fails."""
        fresh.start(self._service.tasks)
        serving = asyncio.create_task(fresh.serve(self._service.notify))
        failing = [asyncio.create_task(each.invalid_input()) for each in (fresh, *groups)]
        try:
            await asyncio.wait((serving, *failing), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                late = f"it was not ready within {timeout_s:g} s; see the log of the service"
                raise UserError(next((each.result() for each in failing if each.done()), late))
        except BaseException:
            await fresh.stop()
            raise
        finally:
            for each in (serving, *failing):
                each.cancel()
        former, self._service.frontends = self._service.frontends, fresh
        await former.stop()


def _is_path(text: str) -> bool:
    return "/" in text or Path(text).suffix != ""
