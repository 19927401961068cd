"""Admits workers, runs the link of each, and performs the steps of `reconcile`."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine

from multiworld import Cause, WorldManager
from multiworld_serving.common.service.snapshots import FailureSnapshot
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.common.wire.join import JoinOffer, JoinRequest
from multiworld_serving.server.leader.metrics import LeaderMetrics
from multiworld_serving.server.leader.pipeline.driver import SchedulerDriver
from multiworld_serving.server.leader.replicas.joining import ELSEWHERE_S, Joining
from multiworld_serving.server.leader.replicas.paced import Paced
from multiworld_serving.server.leader.replicas.placement import Placement
from multiworld_serving.server.leader.replicas.reconcile import (
    GiveUp,
    Goal,
    Promote,
    RemoveSlot,
    Step,
    Switch,
    WorkerStep,
    reconcile,
)
from multiworld_serving.server.leader.replicas.rollout import Rollout
from multiworld_serving.server.leader.replicas.worker import LinkId, Worker
from multiworld_serving.server.leader.replicas.worker_link import WorkerLink
from multiworld_serving.server.leader.versions.version_table import VersionTable

logger = logging.getLogger(__name__)

_MAX_ROUNDS = 1000
"""More rounds of steps without an event in between would be a bug."""


class WorkerRegistry:
    """Owns the slots, the links, and what is desired.

    Args:
        on_change: called after every change of a worker, a slot or the version. Must not raise.

    Attributes:
        goal: what the workers are to be.
        joining: who may join.
        passes: in which the steps are performed.
        rollout: of the next version.
    """

    def __init__(
        self,
        versions: VersionTable,
        settings: LeaderSettings,
        metrics: LeaderMetrics,
        manager: WorldManager,
        driver: SchedulerDriver,
        on_change: Callable[[], None],
    ) -> None:
        self.placement = Placement(settings.replicas_by_stage, settings.spares)
        self.goal = Goal(versions.numbers)
        max_batch_size = driver.scheduler.config.max_batch_size
        self.joining = Joining(versions, settings, self.placement, self.goal, manager, max_batch_size)
        self.rollout = Rollout(versions, self.placement, metrics, settings.join_timeout_s, self.reconcile)
        self._versions = versions
        self._settings = settings
        self._metrics = metrics
        self._driver = driver
        self._on_change = on_change
        self._stopped = False
        self._links: dict[LinkId, WorkerLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.passes = Paced(self._reconcile, self.placement.num_workers)

    def drain(self) -> None:
        """Admit no more workers, and ask the present ones to join other leaders."""
        self.joining.closed = True
        self._release_workers()

    def stop(self) -> None:
        """Admit no more workers, and change nothing any more."""
        self.joining.closed = self._stopped = True
        self.passes.cancel()

    async def close(self) -> None:
        """Stop, close all links and wait until they have ended."""
        self.stop()
        for link in list(self._links.values()):
            link.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def set_unable(self, unable: bool) -> None:
        """Whether this leader cannot serve what the other leaders serve. Then it has only workers that no other leader takes."""
        self.joining.unable = unable
        if unable:
            self._release_workers()

    def _release_workers(self) -> None:
        for link in self._links.values():
            link.release_worker()

    # -- joining -------------------------------------------------------------------------------------------------------------

    def offer(self, request: JoinRequest, host: str) -> JoinOffer:
        """Offer a world and wait for the worker in it, or tell the worker when to ask again."""
        former = self.placement.live_worker(request.worker)
        if former is not None and former.state == "joining" and not self.joining.closed:
            # Its world never formed: it did not receive the offer.
            self._links[former.id].fail(Cause.EXIT, "the worker asked to join again")
        elif self.joining.closed or (self.joining.unable and not request.alone):
            return JoinOffer("", 0, round(ELSEWHERE_S * 1000), elsewhere=True)
        elif wait_s := self.joining.wait_s(request):
            return JoinOffer("", 0, round(wait_s * 1000) + 1)
        worker = self._admit(request, host)
        return JoinOffer(worker.id.world, worker.generation, address=self._settings.advertised(self.joining.port))

    def _admit(self, request: JoinRequest, host: str) -> Worker:
        slot = self.joining.choose_slot(request)
        worker = Worker(request, slot.id, self.placement.next_generation(slot.id.name))
        self.placement.take(slot, worker)
        plans = self._versions.current.stages_for(slot.id.stage)
        link = self._links[worker.id] = WorkerLink(worker, plans, self._on_state, self._driver.on_batch)
        stage = "-" if slot.id.stage is None else slot.id.stage
        fields = *worker.id, stage, slot.id.index, worker.name, request.device, host, request.pid
        logger.info("world=%s generation=%d stage=%s replica=%d worker=%s device=%s host=%s pid=%d joining", *fields)
        settings = self._settings
        running = link.run(
            *(self.joining.manager, settings.join_host, self.joining.port),
            join_timeout_s=settings.join_timeout_s,
            max_batch_size=self._driver.scheduler.config.max_batch_size,
            window=self._driver.scheduler.config.window,
        )
        self._start(running)
        self._on_change()
        return worker

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- events --------------------------------------------------------------------------------------------------------------

    def _on_state(self, link: WorkerLink) -> None:
        if link.worker.state == "broken":
            self._ended(link)
        self.reconcile()

    def after_event(self) -> None:
        """Take note of what the scheduler has released. Called after every event of the scheduler."""
        released, self._driver.released = self._driver.released, []
        for worker, version in released:
            worker.replicas.pop(version, None)
        if not self._retire() and not released:
            return
        self.reconcile()

    def _retire(self) -> bool:
        """Retire the former version when its last batch has ended. Returns whether it is retired now."""
        retiring, scheduler = self._versions.retiring, self._driver.scheduler
        if (
            retiring is None
            or scheduler.current_version not in (None, self._versions.current.key)
            or scheduler.batches_of(retiring.key)
        ):
            return False
        self._versions.retiring = None
        return True

    def _ended(self, link: WorkerLink) -> None:
        worker, ending = link.worker, link.worker.ending
        slot = self.placement.slot_of(worker)
        self._links.pop(worker.id, None)
        assert ending is not None
        assert slot is not None, "a link that has just ended has a slot"
        self.placement.lose(worker)
        if ending.cause != Cause.LEFT:
            slot.last_failure = FailureSnapshot(ending.cause, ending.detail, time.time())
            if not ending.leader_unresponsive:
                self.joining.failed(worker)
            if slot.id.stage is not None:
                self._metrics.world_broken(slot.id.stage, slot.id.index, ending.cause, ending.silent_s)
                slot.lost_at_s = slot.lost_at_s or time.monotonic()
        self._driver.remove(link)

    # -- steps ---------------------------------------------------------------------------------------------------------------

    def reconcile(self) -> None:
        """Perform steps soon, until there are none. Called after every change of a worker or of what is desired."""
        if not self._stopped:
            self.passes.ask()

    def _reconcile(self) -> None:
        self._retire()  # a leader without workers has no events
        for _ in range(_MAX_ROUNDS):
            self.goal.serving, self.goal.loading = self._versions.numbers, self.rollout.loading
            steps = reconcile(self.goal, self.placement, time.monotonic())
            if not steps.now:
                break
            for step in steps.now:
                self._perform(step)
        else:
            logger.error("the workers do not settle; this is a bug, please report it: %s", steps.now)
        self.passes.cancel()  # the steps have asked for another pass, but this one has handled their effects
        if steps.wake_s is not None:
            self.passes.ask(steps.wake_s)
        self._metrics.quarantined.set(self.joining.breaker.quarantined(time.monotonic()))
        self._on_change()

    def _perform(self, step: Step) -> None:
        match step:
            case WorkerStep():
                if link := self._links.get(step.worker.id):
                    self._perform_at(link, step)
            case Promote(spare, slot):
                self.placement.remove(spare)
                worker = spare.worker
                assert worker is not None, "the spare is ready"
                self.placement.take(slot, worker)
                promoted = *worker.id, worker.stage, slot.id.index, worker.name
                logger.info("world=%s generation=%d stage=%d replica=%d worker=%s spare promoted", *promoted)
            case RemoveSlot(slot):
                self.placement.remove(slot)
            case Switch():
                self.rollout.switch()
            case GiveUp(why):
                self.rollout.give_up(why)

    def _perform_at(self, link: WorkerLink, step: WorkerStep) -> None:
        worker, version = link.worker, step.version
        match step.kind:
            case "activate":
                self._metrics.link(worker.stage, worker.slot.index)
                slot = self.placement.slot_of(worker)
                assert slot is not None, "it is connected"
                if slot.lost_at_s is not None and slot.last_failure is not None:
                    waited_s = time.monotonic() - slot.lost_at_s
                    self._metrics.recovery_s.labels(slot.last_failure.cause).observe(waited_s)
                slot.lost_at_s = None
                self._driver.activate(link, self._versions.plan(str(version)))
            case "drain":
                self._driver.drain(link, version)
            case "load":
                worker.busy_with = version
                self._start(self.rollout.load_on(link))
            case "unload":
                link.unload(version)
            case "move":
                if step.stage is None:
                    counts = list(map(self.placement.num_workers, range(self.placement.num_stages)))
                    logger.warning("workers by stage=%s: reassigning worker=%s of %s", counts, worker.name, worker.id)
                else:
                    self.goal.destined[worker.name] = step.stage
                    logger.warning(
                        "replicas of stage=%d share host=%s or its gpu=%s: reassigning worker=%s of %s to stage=%d",
                        *(
                            worker.stage,
                            worker.request.host,
                            worker.request.gpu or "-",
                            worker.name,
                            worker.id,
                            step.stage,
                        ),
                    )
                self.goal.moved_s = time.monotonic()
                link.drain()
            case "restart":
                worker.busy_with = "restart"
                link.request_restart()
            case "close":
                worker.busy_with = "close"
                link.close()
