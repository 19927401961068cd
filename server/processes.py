"""The other processes of a service: what the leader tells them, and how it has them started without knowing how that is done."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from server.settings import ServeSettings


class LocalWorkers(Protocol):
    """The processes of the local workers."""

    def proven(self, worker: str) -> None:
        """That worker serves: should it end, it is worth starting again at once."""

    def present(self, names: Collection[str]) -> None:
        """These workers are with the leader, and no others."""


class FrontendProcesses(Protocol):
    """The processes of the frontends."""

    def proven(self, name: str) -> None:
        """That one serves: should it end, it is worth starting again at once."""

    def present(self, names: Collection[str]) -> None:
        """These are with the leader, and no others."""

    def end(self, name: str) -> None:
        """That one is of no use: kill it."""


class WorkerStarter(Protocol):
    """Starts the local workers, and stops them when its context ends."""

    def __call__(
        self, settings: ServeSettings, leader: str, *, on_restart: Callable[[int], None]
    ) -> AbstractAsyncContextManager[LocalWorkers]: ...


class FrontendStarter(Protocol):
    """Starts the frontends, and stops them when its context ends."""

    def __call__(
        self, settings: ServeSettings, leader: str, *, on_restart: Callable[[int], None]
    ) -> AbstractAsyncContextManager[FrontendProcesses]: ...


@dataclass(frozen=True)
class Processes:
    """How the service's other processes are started.

    Attributes:
        workers: the local ones; None when workers come from elsewhere.
        frontends: for settings that want several.
    """

    workers: WorkerStarter | None
    frontends: FrontendStarter
