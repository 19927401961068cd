"""Moves the service to another version of the model while it serves.

    load, cut, compute the reference   in the leader; a bad file ends here
    each worker in turn                loads its stage of the new version beside the old one, and answers a canary
    all at once                        new requests go to the new version; those that have begun end with the old one
    when the last of those has ended   workers forget the old version

Until all workers have the new version nothing of it is known to the scheduler: when anything goes wrong, workers forget it, and
nothing has changed. One worker at a time, because loading takes memory: where it does not suffice and the kernel ends a
process, that is one worker, whose batches go to the others.
"""

import asyncio
import logging
import time
from typing import Protocol

from multiworld import Cause
from server.link import CanaryError, Link, LinkEndedError
from server.maintenance import Maintenance
from server.predictor import ModelVersion
from server.slots import Slots, ready_links
from server.versions import VersionPlan, Versions

logger = logging.getLogger(__name__)


class VersionFailedError(Exception):
    """The workers do not serve that version. Nothing has changed."""


class VersionSource(Protocol):
    """Makes versions of what an operator names."""

    def plan(self, weights: str | None, versions: Versions) -> VersionPlan:
        """Load, check and cut. Blocks.

        Raises:
            models.ModelError: there are no such weights, they may not be had, or they are no good.
            MemoryError: there is too little for another version.
        """
        ...


class Mover(Protocol):
    """Whose requests move: the leader."""

    def move_to(self, plan: VersionPlan) -> None:
        """Send new requests to `plan`."""


class VersionChange:
    """At most one at a time.

    Args:
        timeout_s: longest wait for one worker to load its part.

    Attributes:
        loading: the name of the version that is on its way to the workers.
    """

    def __init__(
        self,
        mover: Mover,
        slots: Slots,
        versions: Versions,
        source: VersionSource | None,
        timeout_s: float,
        maintenance: Maintenance,
    ) -> None:
        self.loading: str | None = None
        self._mover = mover
        self._slots = slots
        self._versions = versions
        self._source = source
        self._timeout_s = timeout_s
        self._maintenance = maintenance
        self._retired = asyncio.Event()

    async def run(self, weights: str | None) -> ModelVersion:
        """Move to the version with these weights, and wait until the one before is out of use.

        Raises:
            MaintenanceError: something else is under way.
            models.ModelError: see `VersionSource.plan`.
            VersionFailedError: a worker could not load it, failed its canary, or was lost meanwhile.
        """
        with self._maintenance.of("loading a version"):
            plan = await self._plan(weights)
            if plan.version == self._versions.current.version:
                return plan.version
            began_s = time.monotonic()
            self.loading = plan.version.name
            try:
                await self._load_everywhere(plan)
            except BaseException:
                for link in self._links():
                    link.drop(plan.version.number)
                raise
            finally:
                self.loading = None
            self._mover.move_to(plan)
            await self._until_retired()
            logger.info("version %s serves alone after %.1f s", plan.version.name, time.monotonic() - began_s)
            return plan.version

    async def _plan(self, weights: str | None) -> VersionPlan:
        if self._source is None:
            raise VersionFailedError("this service has one version only")
        try:
            return await asyncio.to_thread(self._source.plan, weights, self._versions)
        except MemoryError as error:
            raise VersionFailedError(f"the leader has too little memory for another version: {error}") from error

    async def _load_everywhere(self, plan: VersionPlan) -> None:
        """Who joins meanwhile gets the old version, to serve at once, and then the new one, from here.

        Who is still on the way when all others are done has the old version only: the recruiter has it join again.
        """
        number = plan.version.number
        while (link := next((link for link in self._links() if number not in link.holds), None)) is not None:
            try:
                await self._load(link, plan)
            except LinkEndedError as error:
                if link.state == "draining" or link.cause == Cause.LEFT:
                    continue  # it goes on purpose, which says nothing about the version
                raise VersionFailedError(f"a worker was lost while it loaded {plan.version.name}: {error}") from error
        if lacking := [stage for stage in range(self._slots.num_stages) if not self._holds(stage, number)]:
            raise VersionFailedError(
                f"stage {lacking[0]} has no worker that could load {plan.version.name}; wait for one"
            )

    async def _load(self, link: Link, plan: VersionPlan) -> None:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                await link.load(plan.for_slot(link.slot))
        except CanaryError as error:
            raise VersionFailedError(f"{plan.version.name} is not served: {error}") from error
        except TimeoutError as error:
            detail = f"it has not loaded {plan.version.name} within {self._timeout_s:g} s"
            link.give_up(Cause.HANG, detail)
            raise VersionFailedError(f"{plan.version.name} is not served: {link.worker}: {detail}") from error
        logger.info(
            "world=%s epoch=%d worker=%s holds version %s after_s=%.3f",
            *(link.world_name, link.epoch, link.worker, plan.version.name, time.monotonic() - began_s),
        )

    async def _until_retired(self) -> None:
        """Bounded: requests have deadlines, and a link that is silent with something in flight is broken."""
        self._retired.clear()
        self.look()
        await self._retired.wait()

    def look(self) -> None:
        """Something has happened, which may have been the end of the version before."""
        current = self._versions.current.version.number
        if self._versions.retiring is None and not any(link.duties - {current} for link in self._links()):
            self._retired.set()

    def _links(self) -> list[Link]:
        return ready_links((*self._slots.all, *self._slots.spares))

    def _holds(self, stage: int, number: int) -> bool:
        return any(number in link.holds for link in ready_links(self._slots.of_stage(stage)))
