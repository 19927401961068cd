"""Restarts every worker in turn, each only when the others can do without it."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from server.link import Link
from server.maintenance import Maintenance
from server.slots import Slots, ready_links

_POLL_S = 0.02
_LEAVE_S = 60.0
"""A worker gives up waiting for its batches after 30 s, and ends; beyond this it does not obey."""


class RestartFailedError(Exception):
    """A worker did not leave, or did not come back. Those after it were left alone."""


@dataclass(frozen=True, slots=True)
class RestartStep:
    """One worker, done: `left_s` is the time until it had gone, `back_s` until its place was filled again."""

    worker: str
    place: str
    state: Literal["restarting", "restarted"]
    number: int
    total: int
    left_s: float | None = None
    back_s: float | None = None


class RollingRestart:
    """At most one at a time.

    Args:
        timeout_s: longest wait for a worker to be back, and for the pipeline to be whole before the next one goes.
    """

    def __init__(self, slots: Slots, timeout_s: float, maintenance: Maintenance) -> None:
        self._slots = slots
        self._timeout_s = timeout_s
        self._maintenance = maintenance

    async def run(self) -> AsyncGenerator[RestartStep, None]:
        """Restart the workers that are ready now, spares included. Closing the iterator stops after the one at hand.

        Raises:
            MaintenanceError, RestartFailedError.
        """
        with self._maintenance.of("a rolling restart"):
            links = ready_links((*self._slots.all, *self._slots.spares))
            for number, link in enumerate(links, 1):
                place = link.slot.name
                await self._until(
                    partial(self._can_go, link),
                    self._timeout_s,
                    f"{link.worker} cannot go: some place has been without a ready replica",
                )
                if link.state != "ready":
                    continue  # it failed meanwhile, and so is new already
                yield RestartStep(link.worker, place, "restarting", number, len(links))
                yield await self._restart(link, place, number, len(links))

    async def _restart(self, link: Link, place: str, number: int, total: int) -> RestartStep:
        began_s = time.monotonic()
        link.ask_restart()
        await self._until(lambda: link.state == "broken", _LEAVE_S, f"{link.worker} does not leave")
        left_s = time.monotonic() - began_s
        await self._until(
            lambda: self._slots.whole and self._joined_since(began_s),
            self._timeout_s,
            f"{link.worker} did not come back: what started it must start it again whenever it ends",
        )
        return RestartStep(
            place=place,
            worker=link.worker,
            state="restarted",
            number=number,
            total=total,
            left_s=round(left_s, 3),
            back_s=round(time.monotonic() - began_s, 3),
        )

    def _can_go(self, link: Link) -> bool:
        """Nobody else is missing; or it is gone itself."""
        return link.state != "ready" or self._slots.whole

    def _joined_since(self, time_s: float) -> bool:
        """Whether somebody has come to serve since then, or to be a spare."""
        links = ready_links((*self._slots.all, *self._slots.spares))
        return any(link.ready_at_s is not None and link.ready_at_s > time_s for link in links)

    async def _until(self, condition: Callable[[], bool], timeout_s: float, complaint: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise RestartFailedError(f"{complaint} for {timeout_s:g} s")
            await asyncio.sleep(_POLL_S)
