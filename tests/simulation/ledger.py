"""The checker's own account of what is where, kept from the events and actions alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.scheduler import LinkReady, RequestArrived, SendBatch


@dataclass(slots=True, eq=False)
class RequestEntry:
    id: int
    number: int
    deadline_s: float
    arrived_s: float
    batch: BatchEntry | None = None
    travelled: bool = False
    """Has been in a batch: it no longer has its first place in the queue."""
    suspect: bool = False
    """Has been in a batch that failed or broke all but one of the worlds that it may."""
    worlds_broken: int = 0
    broke_alone: bool = False
    errors: int = 0


@dataclass(slots=True, eq=False)
class LinkEntry:
    id: str
    stage: int
    version: str
    draining: bool = False
    in_flight: dict[int, BatchEntry] = field(default_factory=dict)
    silent_since_s: float = 0.0

    @property
    def rows(self) -> int:
        return sum(len(batch.requests) for batch in self.in_flight.values())

    @property
    def carries_suspect(self) -> bool:
        return any(batch.isolated for batch in self.in_flight.values())


@dataclass(slots=True, eq=False)
class BatchEntry:
    id: int
    version: str
    requests: tuple[RequestEntry, ...]
    isolated: bool
    stage: int = 0
    sent: bool = False
    """Has gone out at this stage."""
    lost: bool = False
    """Lost its link at this stage since it last went out."""
    failed_on: str | None = None
    retries: int = 0
    copies: set[str] = field(default_factory=set)
    """Links where it is in flight and wanted."""
    forgotten: bool = False
    path: list[str] = field(default_factory=list)


class Ledger:
    """Requests that are open, links that may be used, batches that exist."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.requests: dict[int, RequestEntry] = {}
        self.links: dict[str, LinkEntry] = {}
        self.batches: dict[int, BatchEntry] = {}
        self.newest_batch = 0
        self.arrivals = 0
        self.was_complete = False
        self.empty_since_s: dict[tuple[str, int], float] = {}
        self.most_links = 0
        self._versions: list[str] = []
        """As first seen."""

    def arrive(self, event: RequestArrived, now_s: float) -> RequestEntry:
        self.arrivals += 1
        entry = RequestEntry(event.request, self.arrivals, event.deadline_s, now_s)
        self.requests[event.request] = entry
        return entry

    def close(self, request: RequestEntry) -> None:
        del self.requests[request.id]

    def is_open(self, request: RequestEntry) -> bool:
        return self.requests.get(request.id) is request

    def add_link(self, event: LinkReady, now_s: float) -> None:
        self.links[event.link] = LinkEntry(event.link, event.stage, event.version)
        for stage in range(self.num_stages):
            if not self.replicas(stage, event.version):
                self.empty_since_s.setdefault((event.version, stage), now_s)
        self.empty_since_s.pop((event.version, event.stage), None)
        self.was_complete = self.was_complete or self.complete_versions() != []
        self.most_links = max(self.most_links, len(self.links))
        if event.version not in self._versions:
            self._versions.append(event.version)
        self._forget_versions()

    def stop_link(self, link: LinkEntry, now_s: float) -> None:
        """It takes no new batch."""
        if not self.replicas(link.stage, link.version, besides=link):
            self.empty_since_s.setdefault((link.version, link.stage), now_s)

    def remove_link(self, link: LinkEntry, now_s: float) -> None:
        if not link.draining:
            self.stop_link(link, now_s)
        del self.links[link.id]
        for batch in link.in_flight.values():
            batch.copies.discard(link.id)
        self._forget_versions()

    def current_version(self) -> str | None:
        complete = self.complete_versions()
        return next((version for version in reversed(self._versions) if version in complete), None)

    def _forget_versions(self) -> None:
        if self.complete_versions():
            alive = {link.version for link in self.links.values()}
            self._versions = [version for version in self._versions if version in alive]

    def replicas(self, stage: int, version: str, besides: LinkEntry | None = None) -> list[LinkEntry]:
        return [
            link
            for link in self.links.values()
            if link.stage == stage and link.version == version and not link.draining and link is not besides
        ]

    def complete_versions(self) -> list[str]:
        stages: dict[str, set[int]] = {}
        for link in self.links.values():
            if not link.draining:
                stages.setdefault(link.version, set()).add(link.stage)
        return [version for version, found in stages.items() if len(found) == self.num_stages]

    def open_batch(self, action: SendBatch, requests: tuple[RequestEntry, ...]) -> BatchEntry:
        self.newest_batch = action.batch
        batch = BatchEntry(action.batch, action.version, requests, action.isolated)
        self.batches[action.batch] = batch
        for request in requests:
            request.batch = batch
            request.travelled = True
        return batch

    def forget(self, batch: BatchEntry) -> None:
        batch.forgotten = True
        batch.copies.clear()
        del self.batches[batch.id]
        for request in batch.requests:
            if request.batch is batch:
                request.batch = None

    def waiting(self) -> list[RequestEntry]:
        return [request for request in self.requests.values() if request.batch is None]
