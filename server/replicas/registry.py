"""Admits workers: assigns a slot to each, runs its link, fills empty slots, and quarantines workers that fail repeatedly."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Protocol

from multiworld import AskError, Cause, WorldManager
from multiworld_serving.common.wire.join import JoinOffer, JoinRequest
from multiworld_serving.common.wire.message import WireError
from multiworld_serving.server.leader_settings import LeaderSettings
from multiworld_serving.server.observability.leader_metrics import LeaderMetrics
from multiworld_serving.server.replicas.breaker import Breaker
from multiworld_serving.server.replicas.placement import Placement, Slot
from multiworld_serving.server.replicas.worker_link import BatchListener, WorkerLink
from multiworld_serving.server.scheduling.config import WINDOW
from multiworld_serving.server.snapshots import FailureSnapshot, ReplicaSnapshot, StageSnapshot
from multiworld_serving.server.versions.version_table import VersionPlan

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
_REASSIGN_AFTER_S = 3.0
"""How long a stage may have no worker before a worker of a stage with several is reassigned to it."""
_SLOT_RETENTION_S = 60.0
"""How long an extra slot of a failed worker is kept for a successor."""


class WorkerEvents(BatchListener, Protocol):
    """Receives the events of the links that serve a stage. Implemented by the leader."""

    def on_serving(self, link: WorkerLink) -> None:
        """The link serves a stage: batches may be sent."""

    def on_leaving(self, link: WorkerLink) -> None:
        """The worker is leaving: send no new batches, and close the link when it has none in flight."""

    def on_ended(self, link: WorkerLink) -> None:
        """The link has ended; its batches in flight will not return. `link.cause` says why."""


class WorkerRegistry:
    """Owns the slots and the links.

    Args:
        events: receives the events of the serving links.
        on_change: called after every state change of a replica.
    """

    def __init__(
        self,
        plan: VersionPlan,
        settings: LeaderSettings,
        metrics: LeaderMetrics,
        manager: WorldManager,
        events: WorkerEvents,
        on_change: Callable[[], None],
    ) -> None:
        self.placement = Placement(len(plan.stages), settings.replicas, settings.spares)
        self.port = settings.join_port
        self.plan = plan
        self._settings = settings
        self._metrics = metrics
        self._manager = manager
        self._events = events
        self._on_change = on_change
        self._breaker = Breaker()
        self._links: dict[str, WorkerLink] = {}
        self._serving: set[str] = set()
        """Ids of the links that were reported as serving."""
        self._moving: WorkerLink | None = None
        """The worker that is being reassigned to a stage without workers."""
        self._reassigning: asyncio.TimerHandle | None = None
        """Reassigns a worker, or promotes spares when the workers of other leaders have returned."""
        self._expected: dict[Slot, asyncio.TimerHandle] = {}
        """Timers that remove the slot of a failed worker."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._listening_since_s = float("-inf")
        self._returning_until_s = float("-inf")
        """Until then, workers that another leader has placed are expected, so spares stay spares and nobody is reassigned."""

    def use(self, plan: VersionPlan) -> None:
        """Let joining workers load this plan. Connected workers are not affected."""
        self.plan = plan

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
        if self._reassigning is not None:
            self._reassigning.cancel()
        for timer in self._expected.values():
            timer.cancel()

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

    def link(self, link_id: str) -> WorkerLink | None:
        """The live link with this id."""
        return self._links.get(link_id)

    # -- joining -------------------------------------------------------------------------------------------------------------

    async def offer(self, question: str, host: str) -> bytes:
        """Handle a join request: offer a world and wait for the worker in it, or tell the worker when to ask again."""
        try:
            request = JoinRequest.from_json(question)
        except WireError as error:
            raise AskError(str(error)) from error
        if wait_s := self._wait_s(request):
            return JoinOffer("", 0, round(wait_s * 1000) + 1).to_json().encode()
        link = self._admit(request, host)
        return (
            JoinOffer(
                link.world_name,
                link.generation,
                address=self._settings.advertised(self.port),
                leader=self._settings.name,
            )
            .to_json()
            .encode()
        )

    def _wait_s(self, request: JoinRequest) -> float:
        """Seconds until this worker may ask again; 0 if it may join now."""
        if self._closed:
            return _RETRY_WHILE_DRAINING_S
        former = self.placement.live_link_of(request.worker)
        if former is None:
            if request.obeys:
                return 0.0 if self._held(request) else _RETRY_UNASSIGNED_S
            if next(self.placement.stages_without_worker(), None) is not None:
                return 0.0  # a stage has no worker: even a failing worker cannot make it worse
            return self._breaker.wait_s(request.worker, time.monotonic())
        if former.state == "joining":  # the world never formed: the worker did not receive the offer
            former.fail(Cause.EXIT, "the worker asked to join again")
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
        return frozenset(plan.spec.index for plan in self.plan.stages if plan.spec.part in parts)

    def _admit(self, request: JoinRequest, host: str) -> WorkerLink:
        slot = self._choose_slot(request, self._held(request))
        slot.link = link = WorkerLink(
            plans=self.plan.stages_for(slot.stage),
            slot=slot.id,
            generation=self.placement.next_generation(slot.id.name),
            request=request,
            listener=self,
            batches=self._events,
        )
        self._links[link.id] = link
        logger.info(
            "world=%s generation=%d stage=%s replica=%d worker=%s device=%s host=%s pid=%d joining",
            *(link.world_name, link.generation, "-" if slot.stage is None else slot.stage, slot.index),
            *(link.worker, request.device, host, request.pid),
        )
        task = asyncio.create_task(self._run(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._on_change()
        return link

    def _choose_slot(self, request: JoinRequest, held: frozenset[int]) -> Slot:
        """A worker keeps what it holds if it obeys another leader, or if this leader has just started; otherwise it is placed."""
        returning_until_s = self._listening_since_s + _WORKERS_RETURN_S
        if held and (request.obeys or time.monotonic() < returning_until_s):
            if not request.obeys:
                self._returning_until_s = returning_until_s
            return self.placement.slot_holding(held)
        placement, stages = self.placement, self.plan.stages
        needs_mb = {stage.spec.index: _COPIES_OF_WEIGHTS * stage.weights.size / 1e6 for stage in stages}
        too_large = [stage for stage, needed_mb in needs_mb.items() if 0 < request.memory_mb < needed_mb]
        if too_large:
            limits = request.memory_mb, ", ".join(map(str, too_large))
            logger.warning("worker=%s has %d MB of memory, too little for the stages %s", request.worker, *limits)
        return placement.free_slot(placement.choose_stage(request.host, held, too_large))

    async def _run(self, link: WorkerLink) -> None:
        settings = self._settings
        try:
            await link.run(
                self._manager,
                settings.join_host,
                self.port,
                join_timeout_s=settings.join_timeout_s,
                max_batch_size=settings.max_batch_size,
                window=WINDOW,
            )
        finally:
            self._links.pop(link.id, None)

    # -- events of links -------------------------------------------------------------------------------------------------------

    def on_link_state(self, link: WorkerLink) -> None:
        """See `LinkListener`."""
        if link.state == "ready":
            if self.plan.number not in link.loaded_plans:
                logger.info("worker=%s has loaded a version that is no longer served: it joins again", link.worker)
                link.close()
            elif link.slot.stage is not None:
                self._start_serving(link)
        elif link.state == "broken":
            self._ended(link)
        self._fill_empty_slots()
        self._on_change()

    def on_leaving(self, link: WorkerLink) -> None:
        """See `LinkListener`: the worker asks to leave."""
        if link.id in self._serving:
            self._events.on_leaving(link)
        else:
            link.close()
        self._on_change()

    def serving(self) -> list[WorkerLink]:
        """The links that serve a stage."""
        return [link for link in self._links.values() if link.id in self._serving]

    def _slot_of(self, link: WorkerLink) -> Slot:
        slot = self.placement.slot_of(link)
        assert slot is not None, "a live link has a slot"
        return slot

    def _start_serving(self, link: WorkerLink) -> None:
        slot = self._slot_of(link)
        self._metrics.link(link.stage, slot.index)
        if slot.broken_at_s is not None and slot.last_failure is not None:
            self._metrics.recovery_s.labels(slot.last_failure.cause).observe(time.monotonic() - slot.broken_at_s)
            slot.broken_at_s = None
        self._serving.add(link.id)
        self._events.on_serving(link)

    def _ended(self, link: WorkerLink) -> None:
        assert link.cause is not None
        slot = self._slot_of(link)
        if slot in self.placement.spares:
            self.placement.spares.remove(slot)
        if left := link.cause == Cause.LEFT:
            self.placement.remove_extra_slot(slot)
        else:
            slot.last_failure = FailureSnapshot(link.cause, link.detail, time.time())
            if not link.leader_unresponsive:
                self._count_failure(link)
            self._schedule_slot_removal(slot, link)
        if slot.stage is not None and not left:
            self._metrics.world_broken(link.stage, slot.index, link.cause, link.silent_s)
            slot.broken_at_s = slot.broken_at_s or time.monotonic()
        if link.id in self._serving:
            self._serving.discard(link.id)
            self._events.on_ended(link)

    def _schedule_slot_removal(self, slot: Slot, lost: WorkerLink) -> None:
        """Remove the slot of a lost worker after `_SLOT_RETENTION_S`, if it is an extra slot and still free."""

        def remove() -> None:
            del self._expected[slot]
            if slot.link is lost:
                self.placement.remove_extra_slot(slot)
                self._on_change()

        if slot.stage is None or self._closed:
            return
        if slot in self._expected:
            self._expected[slot].cancel()
        self._expected[slot] = asyncio.get_running_loop().call_later(_SLOT_RETENTION_S, remove)

    def _count_failure(self, link: WorkerLink) -> None:
        now_s = time.monotonic()
        served_s = now_s - link.ready_at_s if link.ready_at_s is not None else 0.0
        healthy = link.batches_done >= _HEALTHY_BATCHES or served_s >= _HEALTHY_S
        quarantine_s = self._breaker.failed(link.worker, healthy=healthy, now_s=now_s)
        if quarantine_s:
            failures = self._breaker.failures(link.worker)
            logger.warning(
                "worker=%s failed %d times in a row: quarantined for %.1f s", link.worker, failures, quarantine_s
            )

    # -- empty slots -------------------------------------------------------------------------------------------------------------

    def _fill_empty_slots(self) -> None:
        if self._closed:
            return
        returning_s = self._returning_until_s - time.monotonic()
        if returning_s > 0:
            if self._reassigning is None:
                self._reassigning = asyncio.get_running_loop().call_later(returning_s, self._workers_returned)
            return
        for slot, link in self.placement.promote_spares():
            logger.info(
                "world=%s generation=%d stage=%d replica=%d worker=%s spare promoted",
                *(link.world_name, link.generation, link.stage, slot.index, link.worker),
            )
            self._start_serving(link)
        lacking = next(self.placement.stages_without_worker(), None) is not None
        if self._reassigning is None and lacking and any(self.placement.links()):
            self._reassigning = asyncio.get_running_loop().call_later(_REASSIGN_AFTER_S, self._reassign)

    def _workers_returned(self) -> None:
        self._reassigning = None
        self._fill_empty_slots()
        self._on_change()

    def _reassign(self) -> None:
        """Reassign a worker from the stage with the most ready replicas to a stage that has no worker."""
        self._reassigning = None
        moving = self._moving is not None and self._moving.state != "broken"
        if not moving and (stage := next(self.placement.stages_without_worker(), None)) is not None:
            self._moving = candidate = self.placement.reassignment_candidate()
            if candidate is not None:
                logger.warning(
                    "stage=%d has no worker: reassigning worker=%s of %s",
                    stage,
                    candidate.worker,
                    candidate.id,
                )
                candidate.drain()
                self.on_leaving(candidate)
        self._fill_empty_slots()

    # -- status ------------------------------------------------------------------------------------------------------------------

    def stages(self, in_flight: Callable[[WorkerLink], int]) -> tuple[StageSnapshot, ...]:
        """All slots of all stages. `in_flight` returns the batches in flight on a link."""
        return tuple(
            StageSnapshot(
                plan.spec.index,
                plan.spec.blocks,
                tuple(_snapshot(slot, in_flight) for slot in self.placement.of_stage(plan.spec.index)),
            )
            for plan in self.plan.stages
        )

    def spares(self) -> tuple[ReplicaSnapshot, ...]:
        """The workers that have loaded all stages and serve none."""
        return tuple(_snapshot(slot, lambda _: 0) for slot in self.placement.spares)

    def quarantined(self) -> int:
        """How many workers are quarantined by the circuit breaker."""
        return self._breaker.quarantined(time.monotonic())


def _snapshot(slot: Slot, in_flight: Callable[[WorkerLink], int]) -> ReplicaSnapshot:
    link = slot.link
    if link is None:
        return ReplicaSnapshot(slot.index, "absent")
    return ReplicaSnapshot(
        slot=slot.index,
        state="left" if link.state == "broken" and link.cause == Cause.LEFT else link.state,
        world=link.world_name,
        generation=link.generation,
        worker=link.worker,
        host=link.request.host,
        pid=link.request.pid,
        transport="edges" if link.request.edge else "relay",
        device=link.request.device,
        in_flight=in_flight(link),
        batches_done=link.batches_done,
        last_failure=slot.last_failure,
    )
