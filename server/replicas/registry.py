"""Admits workers, runs the link of each, and performs the steps of `reconcile`."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine

from multiworld import Cause, WorldManager
from multiworld_serving.common.wire.join import JoinOffer, JoinRequest
from multiworld_serving.server.leader_settings import LeaderSettings
from multiworld_serving.server.observability.leader_metrics import LeaderMetrics
from multiworld_serving.server.pipeline.driver import SchedulerDriver
from multiworld_serving.server.replicas.breaker import Breaker
from multiworld_serving.server.replicas.paced import Paced
from multiworld_serving.server.replicas.placement import Placement, Slot
from multiworld_serving.server.replicas.reconcile import (
    GiveUp,
    Goal,
    Promote,
    RemoveSlot,
    Step,
    Switch,
    WorkerStep,
    reconcile,
)
from multiworld_serving.server.replicas.rollout import Rollout
from multiworld_serving.server.replicas.worker import LinkId, Worker
from multiworld_serving.server.replicas.worker_link import WorkerLink
from multiworld_serving.server.scheduling.config import WINDOW
from multiworld_serving.server.snapshots import FailureSnapshot, ReplicaSnapshot, StageSnapshot
from multiworld_serving.server.versions.version_table import VersionTable

logger = logging.getLogger(__name__)

_HEALTHY_BATCHES = 10
_HEALTHY_S = 10.0
"""After this many batches or seconds a worker counts as healthy, and the circuit breaker's count of its failures starts anew."""
_RETRY_WHILE_DRAINING_S = 1.0
_WORKERS_RETURN_S = 6.0
"""After a leader has started, workers of other leaders join within this time: the longest pause between their attempts is 5 s. Until then
they keep what they hold."""
_RETRY_UNASSIGNED_S = 0.25
"""When a worker that obeys another leader, which has assigned it no stage yet, asks again."""
_COPIES_OF_WEIGHTS = 2
"""Held by a worker at once while it loads a stage: the received bytes, and the stage's parameters."""
_MAX_ROUNDS = 1000
"""More rounds of steps without an event in between would be a bug."""


class WorkerRegistry:
    """Owns the slots, the links, and what is desired.

    Args:
        on_change: called after every change of a worker, a slot or the version. Must not raise.

    Attributes:
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
        self.placement = Placement(len(versions.current.stages), settings.replicas, settings.spares)
        self.port = settings.join_port
        self.goal = Goal(versions.numbers)
        self.rollout = Rollout(versions, self.placement, metrics, settings.join_timeout_s, self.reconcile)
        self._versions = versions
        self._settings = settings
        self._metrics = metrics
        self._manager = manager
        self._driver = driver
        self._on_change = on_change
        self._breaker = Breaker()
        self._links: dict[LinkId, WorkerLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._passes = Paced(self._reconcile, lambda: self.placement.num_workers)
        self._changed = asyncio.Event()
        self._closed = False
        self._listening_since_s = float("-inf")

    def listen(self) -> None:
        """Listen for workers. Raises OSError if the port is not available."""
        settings, sock = self._settings, None
        if settings.join_fd is not None:
            sock = socket.socket(fileno=os.dup(settings.join_fd))
        self.port = self._manager.listen(settings.join_host, settings.join_port, sock)
        self._listening_since_s = time.monotonic()

    def stop(self) -> None:
        """Admit no more workers."""
        self._closed = True
        self._passes.cancel()

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

    # -- joining -------------------------------------------------------------------------------------------------------------

    def offer(self, request: JoinRequest, host: str) -> JoinOffer:
        """Offer a world and wait for the worker in it, or tell the worker when to ask again."""
        if wait_s := self._wait_s(request):
            return JoinOffer("", 0, round(wait_s * 1000) + 1)
        worker = self._admit(request, host)
        address, name = self._settings.advertised(self.port), self._settings.name
        return JoinOffer(worker.id.world, worker.generation, address=address, leader=name)

    def _wait_s(self, request: JoinRequest) -> float:
        """Seconds until this worker may ask again; 0 if it may join now."""
        if self._closed:
            return _RETRY_WHILE_DRAINING_S
        former = self.placement.live_worker(request.worker)
        if former is None:
            if request.obeys:
                return 0.0 if self._held(request) else _RETRY_UNASSIGNED_S
            if self.placement.empty_stages():
                return 0.0  # a stage has no worker: even a failing worker cannot make it worse
            return self._breaker.wait_s(request.worker, time.monotonic())
        if former.state == "joining":  # the world never formed: the worker did not receive the offer
            self._links[former.id].fail(Cause.EXIT, "the worker asked to join again")
            return 0.0
        # Either the loss of the former worker is not detected yet (missed heartbeats will show it), or two workers have this name.
        if time.monotonic() - former.since_s > 3 * self._settings.heartbeat_timeout_s:
            logger.warning(
                "worker=%s is connected as %s and another worker with this name asks to join: use another --name",
                request.worker,
                former.id,
            )
        return self._settings.heartbeat_timeout_s

    def _held(self, request: JoinRequest) -> frozenset[int]:
        """The stages of `request.parts`; none of a model that is partitioned differently."""
        parts = request.parts.split(",")
        return frozenset(plan.spec.index for plan in self._versions.current.stages if plan.spec.part in parts)

    def _admit(self, request: JoinRequest, host: str) -> Worker:
        slot = self._choose_slot(request, self._held(request))
        worker = Worker(request, slot.id, self.placement.next_generation(slot.id.name))
        self.placement.take(slot, worker)
        plans = self._versions.current.stages_for(slot.id.stage)
        link = self._links[worker.id] = WorkerLink(worker, plans, self._on_state, self._driver.on_batch)
        logger.info(
            "world=%s generation=%d stage=%s replica=%d worker=%s device=%s host=%s pid=%d joining",
            *(*worker.id, "-" if slot.id.stage is None else slot.id.stage, slot.id.index),
            *(worker.name, request.device, host, request.pid),
        )
        settings = self._settings
        running = link.run(
            *(self._manager, settings.join_host, self.port),
            join_timeout_s=settings.join_timeout_s,
            max_batch_size=settings.max_batch_size,
            window=WINDOW,
        )
        self._start(running)
        self._on_change()
        return worker

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _choose_slot(self, request: JoinRequest, held: frozenset[int]) -> Slot:
        """A worker keeps what it holds if it obeys another leader, or if this leader has just started; otherwise it is placed."""
        returning_until_s = self._listening_since_s + _WORKERS_RETURN_S
        if held and (request.obeys or time.monotonic() < returning_until_s):
            if not request.obeys:
                self.goal.settle_until_s = returning_until_s
            return self.placement.slot_holding(held)
        needs_mb = [_COPIES_OF_WEIGHTS * stage.weights.size / 1e6 for stage in self._versions.current.stages]
        too_large = [stage for stage, needed_mb in enumerate(needs_mb) if 0 < request.memory_mb < needed_mb]
        if too_large:
            limits = request.memory_mb, ", ".join(map(str, too_large))
            logger.warning("worker=%s has %d MB of memory, too little for the stages %s", request.worker, *limits)
        destined = self.goal.destined.pop(request.worker, None)
        if destined in too_large:
            self.goal.immovable.add(request.worker)
        return self.placement.free_slot(self.placement.choose_stage(request.host, held, too_large, destined))

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
            or scheduler.current_version != self._versions.current.key
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
                self._count_failure(worker)
            if slot.id.stage is not None:
                self._metrics.world_broken(slot.id.stage, slot.id.index, ending.cause, ending.silent_s)
                slot.lost_at_s = slot.lost_at_s or time.monotonic()
        self._driver.remove(link)

    def _count_failure(self, worker: Worker) -> None:
        now_s = time.monotonic()
        served_s = now_s - worker.ready_at_s if worker.ready_at_s is not None else 0.0
        healthy = worker.batches_done >= _HEALTHY_BATCHES or served_s >= _HEALTHY_S
        if quarantine_s := self._breaker.failed(worker.name, healthy=healthy, now_s=now_s):
            failures = self._breaker.failures(worker.name)
            logger.warning(
                "worker=%s failed %d times in a row: quarantined for %.1f s", worker.name, failures, quarantine_s
            )

    # -- steps ---------------------------------------------------------------------------------------------------------------

    def reconcile(self) -> None:
        """Perform steps soon, until there are none. Called after every change of a worker or of what is desired."""
        if not self._closed:
            self._passes.ask()

    def _reconcile(self) -> None:
        for _ in range(_MAX_ROUNDS):
            self.goal.serving, self.goal.loading = self._versions.numbers, self.rollout.loading
            steps = reconcile(self.goal, self.placement, time.monotonic())
            if not steps.now:
                break
            for step in steps.now:
                self._perform(step)
        else:
            logger.error("the workers do not settle; this is a bug, please report it: %s", steps.now)
        self._passes.cancel()  # those that the steps have asked for
        if steps.wake_s is not None:
            self._passes.ask(steps.wake_s)
        self._metrics.quarantined.set(self._breaker.quarantined(time.monotonic()))
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()

    async def until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait until this holds; it is checked after every change. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self._changed.wait()

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
                logger.info(
                    "world=%s generation=%d stage=%d replica=%d worker=%s spare promoted",
                    *(*worker.id, worker.stage, slot.id.index, worker.name),
                )
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
                    counts = list(map(self.placement.num_workers_of, range(self.placement.num_stages)))
                    logger.warning("workers by stage=%s: reassigning worker=%s of %s", counts, worker.name, worker.id)
                else:
                    self.goal.destined[worker.name] = step.stage
                    logger.warning(
                        "replicas of stage=%d share host=%s: reassigning worker=%s of %s to stage=%d",
                        *(worker.stage, worker.request.host, worker.name, worker.id, step.stage),
                    )
                self.goal.moved_s = time.monotonic()
                link.drain()
            case "restart":
                worker.busy_with = "restart"
                link.request_restart()
            case "close":
                worker.busy_with = "close"
                link.close()

    # -- status --------------------------------------------------------------------------------------------------------------

    def stages(self) -> tuple[StageSnapshot, ...]:
        """All slots of all stages."""
        return tuple(
            StageSnapshot(
                plan.spec.index,
                plan.spec.blocks,
                tuple(self._snapshot(slot) for slot in self.placement.of_stage(plan.spec.index)),
                self._driver.scheduler.counters.reroutes[plan.spec.index],
            )
            for plan in self._versions.current.stages
        )

    def spares(self) -> tuple[ReplicaSnapshot, ...]:
        """The workers that have loaded all stages and serve none."""
        return tuple(map(self._snapshot, self.placement.of_stage(None)))

    def _snapshot(self, slot: Slot) -> ReplicaSnapshot:
        worker = slot.worker
        if worker is None:
            return ReplicaSnapshot(slot.id.index, "absent")
        request = worker.request
        return ReplicaSnapshot(
            slot=slot.id.index,
            state="left" if slot.left else worker.state,
            world=worker.id.world,
            generation=worker.generation,
            worker=worker.name,
            host=request.host,
            pid=request.pid,
            device=request.device,
            in_flight=self._driver.in_flight(worker),
            batches_done=worker.batches_done,
            last_failure=slot.last_failure,
        )
