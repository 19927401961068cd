"""The checker's model of requests, links and batches, derived from events and actions only."""

from __future__ import annotations

from dataclasses import dataclass, field

from multiworld_serving.server.leader.scheduling.actions import SendBatch
from multiworld_serving.server.leader.scheduling.config import SchedulerConfig
from multiworld_serving.server.leader.scheduling.events import (
    BatchDone,
    BatchFailed,
    Drain,
    Event,
    ReplicaDraining,
    ReplicaLost,
    ReplicaReady,
    RequestArrived,
    RequestCancelled,
)


@dataclass(slots=True, eq=False)
class RequestEntry:
    id: int
    deadline_s: float
    arrived_s: float
    key: str = ""
    batch: BatchEntry | None = None
    suspect: bool = False
    """Was in a batch that failed, or has broken all but one of the worlds that it may break."""
    worlds_broken: int = 0
    broke_alone: bool = False
    errors: int = 0
    batches: int = 0
    """In how many batches it has been."""
    inputs_lost: int = 0
    """How many of them ended because their input was lost."""


@dataclass(slots=True, eq=False)
class LinkEntry:
    id: str
    stage: int
    version: str
    draining: bool = False
    in_flight: dict[int, BatchEntry] = field(default_factory=dict)
    failures: int = 0
    """Batches that raised on this link."""
    silent_since_s: float = 0.0
    """When its first batch in flight was sent, or the one before it returned."""

    @property
    def carries_suspect(self) -> bool:
        """Whether an isolated batch is in flight."""
        return any(batch.isolated for batch in self.in_flight.values())


@dataclass(slots=True, eq=False)
class BatchEntry:
    id: int
    version: str
    requests: tuple[RequestEntry, ...]
    isolated: bool
    stage: int = 0
    sent: bool = False
    """Was sent at this stage."""
    lost: bool = False
    """Lost its link at this stage after the last send."""
    failed_on: str | None = None
    retries: int = 0
    copies: set[str] = field(default_factory=set)
    """Links on which a copy is in flight whose result can be used."""
    holder: LinkEntry | None = None
    """The link that keeps its input."""
    input_lost: bool = False
    hedged_link: str | None = None
    """The link on which it was late, and was hedged."""

    @property
    def open(self) -> bool:
        """Whether one of its requests is open."""
        return any(request.batch is self for request in self.requests)

    def open_requests(self) -> list[RequestEntry]:
        return [request for request in self.requests if request.batch is self]


class ReferenceModel:
    """All open requests, usable links and existing batches."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.num_stages = config.num_stages
        self._config = config
        self.requests: dict[int, RequestEntry] = {}
        self.links: dict[str, LinkEntry] = {}
        self.batches: dict[int, BatchEntry] = {}
        self.longest_work_s = 0.0
        """Longest time that a replica of the first stage took for a batch."""
        self.refunded_rows = 0
        """Rows of hedged batches whose link was lost."""
        self.newest_batch = 0
        self.was_complete = False
        self.complete_versions: list[str] = []
        """Versions of which every stage has a replica, oldest first."""
        self.empty_since_s: dict[tuple[str, int], float] = {}
        self.versions_seen: set[str] = set()
        self._versions: list[str] = []
        """In the order of first appearance."""
        self.draining = False

    def apply(self, event: Event, now_s: float) -> BatchEntry | None:
        """Apply an event. Returns the batch whose result, output or error, has arrived and can be used."""
        match event:
            case RequestArrived():
                self.requests[event.request] = RequestEntry(event.request, event.deadline_s, now_s, event.key)
            case RequestCancelled():
                if (request := self.requests.get(event.request)) is not None:
                    self.close(request)
            case ReplicaReady():
                self._add_link(event, now_s)
            case ReplicaDraining():
                if (link := self.links.get(event.replica)) is not None and not link.draining:
                    self._drain_link(link, now_s)
            case ReplicaLost():
                if (link := self.links.get(event.replica)) is not None:
                    self.lose_link(link, now_s, blames=event.cause != "left")
            case BatchDone():
                return self._return_copy(event.batch, event.replica, now_s)
            case BatchFailed():
                return self._fail_copy(event, now_s)
            case Drain():
                self.draining = True
        return None

    # Requests.

    def close(self, request: RequestEntry) -> None:
        """Close a request that was answered, refused or cancelled."""
        del self.requests[request.id]
        request.batch = None

    def waiting(self) -> list[RequestEntry]:
        """Open requests in no batch."""
        return [request for request in self.requests.values() if request.batch is None]

    def has_suspects(self) -> bool:
        """Whether a request is isolated or may be."""
        return any(link.carries_suspect for link in self.links.values()) or any(
            request.suspect and (request.batch is None or request.batch.isolated) for request in self.requests.values()
        )

    # Links.

    def _add_link(self, event: ReplicaReady, now_s: float) -> None:
        self.versions_seen.add(event.version)
        if event.replica in self.links:
            return
        self.links[event.replica] = LinkEntry(event.replica, event.stage, event.version)
        for stage in range(self.num_stages):
            if not self.replicas(stage, event.version):
                self.empty_since_s.setdefault((event.version, stage), now_s)
        self.empty_since_s.pop((event.version, event.stage), None)
        if event.version not in self._versions:
            self._versions.append(event.version)
        self._links_changed()

    def _drain_link(self, link: LinkEntry, now_s: float) -> None:
        """Mark a link as draining: it gets no new batch."""
        link.draining = True
        if not self.replicas(link.stage, link.version):
            self.empty_since_s.setdefault((link.version, link.stage), now_s)
        self._links_changed()

    def lose_link(self, link: LinkEntry, now_s: float, *, blames: bool) -> None:
        """Remove a link that broke; its copies in flight are lost."""
        alone = len(link.in_flight) == 1
        self.refunded_rows += sum(len(each.requests) for each in link.in_flight.values() if each.hedged_link == link.id)
        for batch in link.in_flight.values():
            if link.id not in batch.copies:
                continue
            batch.lost, batch.failed_on = True, None
            requests = batch.open_requests() if blames and not link.draining else []
            for request in requests:
                request.worlds_broken += 1
                request.broke_alone = alone and len(batch.requests) == 1
                # One more than the limit if two copies were in flight when it was reached.
                assert request.worlds_broken <= self._config.max_attempts + 1, (
                    "a request broke more worlds than max_attempts allows"
                )
            if any(request.worlds_broken >= self._config.max_attempts - 1 for request in requests):
                for request in requests:
                    request.suspect = True
        self.remove_link(link, now_s)

    def remove_link(self, link: LinkEntry, now_s: float) -> None:
        if not link.draining:
            self._drain_link(link, now_s)
        del self.links[link.id]
        for batch in link.in_flight.values():
            batch.copies.discard(link.id)
        for batch in self.batches.values():
            if batch.holder is link:
                batch.input_lost, batch.holder = True, None
        self._links_changed()

    def holds_inputs(self, link: LinkEntry) -> bool:
        """Whether this link keeps the input of a batch."""
        return any(batch.holder is link for batch in self.batches.values())

    def replicas(self, stage: int, version: str) -> list[LinkEntry]:
        """Links of the stage that are ready and not draining."""
        found = (link for link in self.links.values() if link.stage == stage and not link.draining)
        return [link for link in found if link.version == version]

    def _links_changed(self) -> None:
        stages = range(self.num_stages)
        self.complete_versions = [
            version for version in self._versions if all(self.replicas(stage, version) for stage in stages)
        ]
        if self.complete_versions:
            self.was_complete = True
            alive = {link.version for link in self.links.values()}
            self._versions = [version for version in self._versions if version in alive]

    # Batches.

    def open_batch(self, action: SendBatch, requests: tuple[RequestEntry, ...]) -> BatchEntry:
        self.newest_batch = action.batch
        batch = self.batches[action.batch] = BatchEntry(action.batch, action.version, requests, action.isolated)
        for request in requests:
            request.batch = batch
        return batch

    def send(self, batch: BatchEntry, link: LinkEntry, now_s: float) -> None:
        """Record that a copy was sent."""
        if not link.in_flight:
            link.silent_since_s = now_s
        link.in_flight[batch.id] = batch
        batch.copies.add(link.id)
        batch.sent, batch.lost, batch.failed_on = True, False, None

    def _return_copy(self, batch_id: int, link_id: str, now_s: float) -> BatchEntry | None:
        """Record that a copy has returned. Returns its batch if its result can be used."""
        link = self.links.get(link_id)
        first = next(iter(link.in_flight), None) if link else None
        batch = link.in_flight.pop(batch_id, None) if link else None
        if link is None or batch is None:
            return None
        if link.stage == 0:
            self.longest_work_s = max(self.longest_work_s, now_s - link.silent_since_s)
        if batch_id == first:
            link.silent_since_s = now_s
        wanted = link_id in batch.copies
        batch.copies.discard(link_id)
        return batch if wanted else None

    def _fail_copy(self, event: BatchFailed, now_s: float) -> BatchEntry | None:
        link = self.links.get(event.replica)
        if event.sent and link is not None and event.batch in link.in_flight:
            link.failures += 1
        batch = self._return_copy(event.batch, event.replica, now_s)
        if batch is not None:
            batch.failed_on = event.replica
            for request in batch.open_requests():
                request.errors += 1
                request.suspect = True
        return batch

    def advance(self, batch: BatchEntry, holder: LinkEntry | None) -> None:
        """Move a batch to the next stage and reset its state there. `holder` keeps its input."""
        batch.holder, batch.input_lost = holder, False
        batch.stage += 1
        batch.sent, batch.lost, batch.failed_on, batch.retries = False, False, None, 0
        batch.copies.clear()

    def drop_batch(self, batch: BatchEntry) -> None:
        """Remove a batch; its open requests wait again."""
        batch.copies.clear()
        del self.batches[batch.id]
        for request in batch.open_requests():
            request.batch = None
            request.inputs_lost += batch.input_lost

    # Queries.

    def batch_due_s(self) -> float:
        """Latest send time of the oldest request. With adaptive batching it may wait as long as a replica may be busy."""
        config = self._config
        due_s = min(request.arrived_s for request in self.waiting()) + config.batch_timeout_s
        if config.adaptive_batching:
            replicas = [link for version in self.complete_versions for link in self.replicas(0, version)]
            busy_since_s = max((link.silent_since_s for link in replicas if link.in_flight), default=0.0)
            due_s = max(due_s, busy_since_s + config.window * self.longest_work_s)
        return due_s

    def first_stage_has_room(self, window: int) -> bool:
        """Whether the first stage of every complete version has a replica with less than `window` batches in flight."""
        first_stages = [self.replicas(0, version) for version in self.complete_versions]
        return bool(first_stages) and all(any(len(link.in_flight) < window for link in links) for links in first_stages)

    def stage_is_lost(self, request: RequestEntry, now_s: float) -> bool:
        """Whether the stage that the request needs (any stage, if it is queued) has been empty for the recovery grace."""
        latest_s = now_s - self._config.recovery_grace_s + 1e-9
        if self.complete_versions:
            return False
        if request.batch is not None:
            empty_since_s = self.empty_since_s.get((request.batch.version, request.batch.stage))
            return empty_since_s is not None and empty_since_s <= latest_s
        return any(since_s <= latest_s for since_s in self.empty_since_s.values())
