"""Rolling restart: restarts the workers one after another, each only while all other replicas are ready."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial

from multiworld_serving.server.administration import RestartFailedError, RestartStep
from multiworld_serving.server.replicas.exclusive_operation import ExclusiveOperation
from multiworld_serving.server.replicas.placement import Placement, ready_links
from multiworld_serving.server.replicas.worker_link import WorkerLink

_POLL_S = 0.02
_LEAVE_S = 60.0
"""A worker waits at most 30 s for its batches before it exits. After this time it counts as not responding."""


class RollingRestart:
    """Runs at most one restart at a time.

    Args:
        timeout_s: longest wait for a worker to join again, and for all replicas to be ready before the next worker is restarted.
    """

    def __init__(self, placement: Placement, timeout_s: float, exclusive: ExclusiveOperation) -> None:
        self._placement = placement
        self._timeout_s = timeout_s
        self._exclusive = exclusive

    async def run(self) -> AsyncGenerator[RestartStep, None]:
        """Restart the workers that are ready now, including spares. Closing the iterator stops after the current worker.

        Raises:
            OperationInProgressError, RestartFailedError.
        """
        with self._exclusive.acquire("a rolling restart"):
            links = ready_links((*self._placement.all, *self._placement.spares))
            for number, link in enumerate(links, 1):
                slot = link.slot.name
                await self._until(
                    partial(self._can_go, link),
                    self._timeout_s,
                    f"cannot restart {link.worker}: a slot has had no ready replica",
                )
                if link.state != "ready":
                    continue  # it failed meanwhile, so its successor is already a new process
                yield RestartStep(link.worker, slot, "restarting", number, len(links))
                yield await self._restart(link, slot, number, len(links))

    async def _restart(self, link: WorkerLink, slot: str, number: int, total: int) -> RestartStep:
        began_s = time.monotonic()
        link.request_restart()
        await self._until(lambda: link.state == "broken", _LEAVE_S, f"{link.worker} has not left")
        left_s = time.monotonic() - began_s
        await self._until(
            lambda: self._placement.fully_replicated and self._joined_since(began_s),
            self._timeout_s,
            f"{link.worker} did not join again; whatever starts the worker must restart it when it exits. Waited",
        )
        back_s = time.monotonic() - began_s
        return RestartStep(link.worker, slot, "restarted", number, total, round(left_s, 3), round(back_s, 3))

    def _can_go(self, link: WorkerLink) -> bool:
        """Whether all replicas are ready, or this worker has ended already."""
        return link.state != "ready" or self._placement.fully_replicated

    def _joined_since(self, time_s: float) -> bool:
        """Whether a worker has become ready since then, as a replica or a spare."""
        links = ready_links((*self._placement.all, *self._placement.spares))
        return any(link.ready_at_s is not None and link.ready_at_s > time_s for link in links)

    async def _until(self, condition: Callable[[], bool], timeout_s: float, complaint: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise RestartFailedError(f"{complaint} for {timeout_s:g} s")
            await asyncio.sleep(_POLL_S)
