"""Protocols for the child processes of the service (workers and frontends). The launcher in `deploy` implements them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from multiworld_serving.server.settings import ServeSettings


class LocalWorkers(Protocol):
    """The processes of the local workers."""

    def proven(self, worker: str) -> None:
        """This worker serves: reset its restart backoff."""

    def present(self, names: Collection[str]) -> None:
        """Exactly these workers are connected to the leader."""


class FrontendProcesses(Protocol):
    """The processes of the frontends."""

    def proven(self, name: str) -> None:
        """This frontend serves: reset its restart backoff."""

    def present(self, names: Collection[str]) -> None:
        """Exactly these frontends are connected to the leader."""

    def end(self, name: str) -> None:
        """Kill this frontend, because it does not work any more."""


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
    """How the service starts its child processes.

    Attributes:
        workers: starts the local workers; None if all workers are external.
        frontends: starts the frontends, if the settings ask for several.
    """

    workers: WorkerStarter | None
    frontends: FrontendStarter
