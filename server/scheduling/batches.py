"""Requests, the batches that they travel in, and the copies of a batch that are in flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from server.scheduling.actions import SendKind
from server.scheduling.events import BatchId, LinkId, RequestId

if TYPE_CHECKING:
    from server.scheduling.pools import Link, Pipeline, Pool


@dataclass(slots=True, eq=False)
class Request:
    """An accepted request that has got neither answer nor refusal."""

    id: RequestId
    deadline_s: float
    arrived_s: float
    since_s: float
    """Since when it could have gone on: its arrival, or its isolation."""
    batch: Batch | None = None
    """None while it waits for its first batch, or to be sent alone."""
    worlds_broken: int = 0
    """Worlds that broke while it was in flight there, whoever's fault it was."""
    resends: int = 0
    isolated: bool = False


@dataclass(slots=True, eq=False)
class Copy:
    """A batch in flight over one link. Hedging makes a second one; the first to answer wins.

    A copy whose batch no longer lists it (another one won, or nobody wants the answer) only holds its place in the
    link's window until it lands.
    """

    batch: Batch
    link: Link
    kind: SendKind
    sent_s: float

    def detach(self) -> bool:
        """Take it off its batch's list. False if the batch did not count on it any more."""
        wanted = self.batch.copies.get(self.link.id) is self
        if wanted:
            del self.batch.copies[self.link.id]
        return wanted


@dataclass(slots=True, eq=False)
class Batch:
    """Rows that travel together, all through one version of the model."""

    id: BatchId
    rows: tuple[Request, ...]
    """Fixed, also when some are closed on the way."""
    pipeline: Pipeline
    isolated: bool
    resends: int
    since_s: float
    """Since when it could have gone on; see `SendBatch.waited_s`."""
    open_rows: int
    kind: SendKind = "first"
    stage: int = 0
    copies: dict[LinkId, Copy] = field(default_factory=dict)
    failed_on: Link | None = None
    """Where this stage raised; a retry goes elsewhere."""
    retried: bool = False
    path: list[LinkId] = field(default_factory=list)

    @property
    def pool(self) -> Pool:
        """The replicas that can do its next piece of work."""
        return self.pipeline.pools[self.stage]

    def open_requests(self) -> Iterator[tuple[int, Request]]:
        """(row, request) of those that still want an answer."""
        return ((row, request) for row, request in enumerate(self.rows) if request.batch is self)

    def advance(self, now_s: float) -> None:
        """On to the next stage, with a clean slate there."""
        self.stage += 1
        self.since_s = now_s
        self.failed_on = None
        self.retried = False
