"""Takes workers in: gives each a stage or a spare's place, brings its link up, fills what falls empty, keeps away who keeps failing."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from multiworld import Cause, WorldManager
from server.breaker import Breaker
from server.link import BatchListener, Link
from server.metrics import Metrics
from server.predictor import FailureSnapshot, ReplicaSnapshot, StageSnapshot
from server.settings import ServeSettings
from server.slots import Slot, Slots
from server.versions import VersionPlan
from wire import JoinOffer, JoinRequest, WireError

logger = logging.getLogger(__name__)

_PROVEN_BATCHES = 10
_PROVEN_S = 10.0
"""A worker that has answered so many batches, or served so long, was sound: its end is the first failure of a new count."""
_AWAY_WHILE_DRAINING_S = 1.0


class Employer(BatchListener, Protocol):
    """Whom the links serve: the leader."""

    def on_serving(self, link: Link) -> None:
        """Batches may be sent to it."""

    def on_leaving(self, link: Link) -> None:
        """It is to get no new batch; close it once it has nothing in flight."""

    def on_ended(self, link: Link) -> None:
        """It is gone, and what was in flight there with it. `link.cause` says why."""


class Recruiter:
    """Owns the slots and the links in them.

    Args:
        on_change: called when a replica changed its state.
    """

    def __init__(
        self,
        plan: VersionPlan,
        settings: ServeSettings,
        metrics: Metrics,
        manager: WorldManager,
        employer: Employer,
        on_change: Callable[[], None],
    ) -> None:
        self.slots = Slots(len(plan.stages), settings.replicas, settings.spares)
        self.port = settings.join_port
        self.plan = plan
        """What newcomers are given to serve. Whoever changes it sees to those that are here."""
        self._settings = settings
        self._metrics = metrics
        self._manager = manager
        self._employer = employer
        self._on_change = on_change
        self._breaker = Breaker(first_s=settings.breaker_s, longest_s=settings.breaker_max_s)
        self._links: dict[str, Link] = {}
        self._serving: set[str] = set()
        """Ids of the links that the employer was told of."""
        self._moving: Link | None = None
        """Who was told to go to a stage that has nobody."""
        self._reassigning: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def listen(self) -> None:
        """Take workers in from now on. Raises OSError when the port cannot be had."""
        host = self._settings.join_host
        self.port = self._manager.listen(host, self._settings.join_port)
        self._manager.answer(host, self.port, self._offer)

    def stop(self) -> None:
        """Take nobody in any more."""
        self._closed = True
        if self._reassigning is not None:
            self._reassigning.cancel()

    async def close(self) -> None:
        """Say goodbye to all."""
        self.stop()
        for link in list(self._links.values()):
            link.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def link(self, link_id: str) -> Link | None:
        """The link of this id, if it lives."""
        return self._links.get(link_id)

    # -- who comes -----------------------------------------------------------------------------------------------------------

    async def _offer(self, question: str, host: str) -> bytes:
        """A worker asks for work: give it a world, and wait there for it."""
        try:
            request = JoinRequest.from_json(question)
        except WireError as error:
            logger.warning("a question from %s makes no sense: %s", host, error)
            raise
        if wait_s := self._wait_s(request):
            return JoinOffer("", 0, round(wait_s * 1000) + 1).to_json().encode()
        link = self._take_in(request, host)
        return JoinOffer(link.world_name, link.epoch, address=self._settings.advertised(self.port)).to_json().encode()

    def _wait_s(self, request: JoinRequest) -> float:
        """How long this worker has to stay away; 0 when it may come in."""
        if self._closed:
            return _AWAY_WHILE_DRAINING_S
        former = self.slots.former_self(request.worker)
        if former is None:
            if next(self.slots.without_worker(), None) is not None:
                return 0.0  # a stage has nobody: there is nothing to protect from this worker
            return self._breaker.wait_s(request.worker, time.monotonic())
        if former.state == "joining":  # the world that it was offered never formed: nobody is there who could be alive
            former.give_up(Cause.EXIT, "its worker asks again")
            return 0.0
        # Either its end has not come through to us, which the heartbeats will change, or there are two of that name.
        if time.monotonic() - former.since_s > 3 * self._settings.heartbeat_timeout_s:
            logger.warning(
                "worker=%s serves in %s, and another of that name wants to: give it another --name",
                request.worker,
                former.id,
            )
        return self._settings.heartbeat_timeout_s

    def _take_in(self, request: JoinRequest, host: str) -> Link:
        slot = self.slots.choose(request.host)
        slot.link = link = Link(
            plans=self.plan.for_slot(slot),
            slot=slot,
            epoch=self.slots.next_epoch(slot.name),
            request=request,
            listener=self,
            batches=self._employer,
        )
        self._links[link.id] = link
        logger.info(
            "world=%s epoch=%d stage=%s replica=%d worker=%s device=%s host=%s pid=%d joining",
            *(link.world_name, link.epoch, "-" if slot.stage is None else slot.stage, slot.index),
            *(link.worker, request.device, host, request.pid),
        )
        task = asyncio.create_task(self._run(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._on_change()
        return link

    async def _run(self, link: Link) -> None:
        settings = self._settings
        try:
            await link.run(
                self._manager,
                settings.join_host,
                self.port,
                join_timeout_s=settings.join_timeout_s,
                max_batch_size=settings.max_batch_size,
                window=settings.window,
            )
        finally:
            self._links.pop(link.id, None)

    # -- what links say --------------------------------------------------------------------------------------------------------

    def on_link_state(self, link: Link) -> None:
        """See `LinkListener`."""
        if link.state == "ready":
            if self.plan.version.number not in link.holds:
                logger.info("worker=%s was given a version that is not served any more: it joins again", link.worker)
                link.close()
            elif link.slot.stage is not None:
                self._serves(link)
        elif link.state == "broken":
            self._ended(link)
        self._fill_empty_slots()
        self._on_change()

    def on_leaving(self, link: Link) -> None:
        """See `LinkListener`: its worker wants to go."""
        if link.id in self._serving:
            self._employer.on_leaving(link)
        else:
            link.close()
        self._on_change()

    def serving(self) -> list[Link]:
        """Those that serve a stage."""
        return [link for link in self._links.values() if link.id in self._serving]

    def _serves(self, link: Link) -> None:
        slot = link.slot
        self._metrics.world_ready(slot.name, link.stage, slot.index)
        if slot.broken_at_s is not None and slot.last_failure is not None:
            self._metrics.world_recovered(cause=slot.last_failure.cause, seconds=time.monotonic() - slot.broken_at_s)
            slot.broken_at_s = None
        self._serving.add(link.id)
        self._employer.on_serving(link)

    def _ended(self, link: Link) -> None:
        assert link.cause is not None
        slot = link.slot
        if slot in self.slots.spares:
            self.slots.spares.remove(slot)
        left = link.cause == Cause.LEFT
        if not left:
            slot.last_failure = FailureSnapshot(link.cause, link.detail, time.time())
            if not link.blames_us:
                self._count_failure(link)
        if slot.stage is not None:
            self._tell_metrics(link, left=left)
        if link.id in self._serving:
            self._serving.discard(link.id)
            self._employer.on_ended(link)

    def _tell_metrics(self, link: Link, *, left: bool) -> None:
        slot = link.slot
        if left:
            self._metrics.world_closed(slot.name, link.stage, slot.index)
            return
        self._metrics.world_broken(
            slot.name, link.stage, slot.index, cause=link.cause or "", detected_after_s=link.silent_s
        )
        slot.broken_at_s = slot.broken_at_s or time.monotonic()

    def _count_failure(self, link: Link) -> None:
        now_s = time.monotonic()
        served_s = now_s - link.ready_at_s if link.ready_at_s is not None else 0.0
        proven = link.batches_done >= _PROVEN_BATCHES or served_s >= _PROVEN_S
        away_s = self._breaker.failed(link.worker, proven=proven, now_s=now_s)
        if away_s:
            failures = self._breaker.failures(link.worker)
            logger.warning("worker=%s failed %d times in a row: kept away for %.1f s", link.worker, failures, away_s)

    # -- what falls empty --------------------------------------------------------------------------------------------------------

    def _fill_empty_slots(self) -> None:
        if self._closed:
            return
        for slot, link in self.slots.take_over():
            logger.info(
                "world=%s epoch=%d stage=%d replica=%d worker=%s takes over",
                *(link.world_name, link.epoch, link.stage, slot.index, link.worker),
            )
            self._serves(link)
        after_s = self._settings.reassign_after_s
        lacking = next(self.slots.without_worker(), None) is not None
        if self._reassigning is None and after_s and lacking and self.slots.donor() is not None:
            self._reassigning = asyncio.get_running_loop().call_later(after_s, self._reassign)

    def _reassign(self) -> None:
        """A stage has had nobody for some time, and nobody has come: one of a richer stage goes there."""
        self._reassigning = None
        moving = self._moving is not None and self._moving.state != "broken"
        if not moving and (stage := next(self.slots.without_worker(), None)) is not None:
            self._moving = donor = self.slots.donor()
            if donor is not None:
                logger.warning("stage=%d has nobody: worker=%s of %s goes there", stage, donor.worker, donor.id)
                donor.drain()
                self.on_leaving(donor)
        self._fill_empty_slots()

    # -- how it stands -----------------------------------------------------------------------------------------------------------

    def stages(self, in_flight: Callable[[Link], int]) -> tuple[StageSnapshot, ...]:
        """All slots of all stages. `in_flight`: batches of a link."""
        return tuple(
            StageSnapshot(
                plan.spec.index,
                plan.spec.blocks,
                tuple(_snapshot(slot, in_flight) for slot in self.slots.of_stage(plan.spec.index)),
            )
            for plan in self.plan.stages
        )

    def spares(self) -> tuple[ReplicaSnapshot, ...]:
        """The workers that hold all stages and serve none."""
        return tuple(_snapshot(slot, lambda _: 0) for slot in self.slots.spares)

    def kept_away(self) -> int:
        """How many workers the breaker keeps away now."""
        return self._breaker.kept_away(time.monotonic())


def _snapshot(slot: Slot, in_flight: Callable[[Link], int]) -> ReplicaSnapshot:
    link = slot.link
    if link is None:
        return ReplicaSnapshot(slot.index, "absent")
    return ReplicaSnapshot(
        slot=slot.index,
        state=link.state,
        world=link.world_name,
        epoch=link.epoch,
        worker=link.worker,
        host=link.request.host,
        pid=link.request.pid,
        device=link.request.device,
        in_flight=in_flight(link),
        batches_done=link.batches_done,
        last_failure=slot.last_failure,
    )
