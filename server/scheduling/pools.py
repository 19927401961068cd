"""Links in pools: the replicas of one stage under one version, and the work that waits for them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

from server.scheduling.batches import Batch, Copy
from server.scheduling.events import BatchId, LinkId
from server.scheduling.priority_map import PriorityMap


@dataclass(slots=True, eq=False)
class Link:
    """One replica as the leader sees it."""

    id: LinkId
    pool: Pool
    copies: dict[BatchId, Copy] = field(default_factory=dict)
    """In flight, in the order sent."""
    rows: int = 0
    """Outstanding rows."""
    draining: bool = False
    unmatched_failures: int = 0
    """Batches in a row that raised here and succeeded elsewhere."""
    answered_s: float = float("-inf")
    last_used: int = 0


class Pool:
    """The replicas of one stage that run one version, and three lines of batches for them.

    `line` is served in order. `retries` go first, but not to the replica where they failed. `isolated` batches travel
    alone: one link at a time is reserved for them, which takes nothing else until it is empty and the suspect has
    landed. Where there is but one link, the suspects and the rest take turns.
    """

    def __init__(self, pipeline: Pipeline, stage: int, window: int) -> None:
        self.pipeline = pipeline
        self.stage = stage
        self.window = window
        self.open: dict[LinkId, Link] = {}
        """Ready and not draining."""
        self.available: PriorityMap[Link, tuple[int, int]] = PriorityMap()
        """Open, with room and not reserved: fewest outstanding rows first, then least recently used."""
        self.line: OrderedDict[BatchId, Batch] = OrderedDict()
        self.retries: OrderedDict[BatchId, Batch] = OrderedDict()
        self.isolated: OrderedDict[BatchId, Batch] = OrderedDict()
        self.reserved: Link | None = None
        self.isolated_first = True
        self.expired = False
        """Empty beyond the grace."""
        self._uses = 0

    @property
    def waiting(self) -> int:
        """Batches that wait here."""
        return len(self.line) + len(self.retries) + len(self.isolated)

    @property
    def choked(self) -> bool:
        """Enough waits here to keep every replica busy: send no more this way."""
        return len(self.line) + len(self.retries) >= max(1, len(self.open))

    def has_other(self, link: Link | None) -> bool:
        """Is there another replica than this one?"""
        return any(each is not link for each in islice(self.open.values(), 2))

    def rank(self, link: Link) -> None:
        """Put the link in its place among those that can take a batch, after anything about it has changed."""
        if link.id in self.open and link is not self.reserved and len(link.copies) < self.window:
            self.available.set(link, (link.rows, link.last_used))
        else:
            self.available.discard(link)

    def add_copy(self, copy: Copy) -> None:
        """The batch goes out over one of our links."""
        self._uses += 1
        link = copy.link
        link.copies[copy.batch.id] = copy
        link.rows += len(copy.batch.rows)
        link.last_used = self._uses
        self.rank(link)

    def remove_copy(self, copy: Copy) -> None:
        """The link has answered, for better or worse."""
        link = copy.link
        del link.copies[copy.batch.id]
        link.rows -= len(copy.batch.rows)
        if link is self.reserved and copy.batch.isolated:
            self.release()
            self.isolated_first = len(self.open) > 1 and not self.retries
        self.rank(link)

    def reserve(self) -> Link | None:
        """The link for suspects: the one reserved already, or now the least loaded that has room."""
        if self.reserved is None:
            self.reserved = self.available.first()
            if self.reserved is not None:
                self.rank(self.reserved)
        return self.reserved

    def release(self) -> None:
        """The reserved link serves everybody again. Not to be called while a suspect is in flight there."""
        link, self.reserved = self.reserved, None
        if link is not None:
            self.rank(link)

    def close(self, link: Link) -> None:
        """The link takes no new batch."""
        self.open.pop(link.id, None)
        if self.reserved is link:
            self.reserved = None
        self.available.discard(link)

    def wait(self, batch: Batch, *, at_head: bool) -> None:
        """Put the batch in its line."""
        line = self._line_of(batch)
        line[batch.id] = batch
        if at_head:
            line.move_to_end(batch.id, last=False)

    def withdraw(self, batch: Batch) -> None:
        """The batch no longer waits here, if it did."""
        self._line_of(batch).pop(batch.id, None)

    def batches(self) -> list[Batch]:
        """All that wait here, in the order in which they would go."""
        return [*self.retries.values(), *self.line.values(), *self.isolated.values()]

    def _line_of(self, batch: Batch) -> OrderedDict[BatchId, Batch]:
        if batch.isolated:
            return self.isolated
        return self.line if batch.failed_on is None else self.retries


class Pipeline:
    """One version of the model: a pool for each stage."""

    def __init__(self, version: str, num_stages: int, window: int) -> None:
        self.version = version
        self.pools = [Pool(self, stage, window) for stage in range(num_stages)]
        self.num_links = 0
        """Links of this version, the draining ones included."""
        self.num_batches = 0
        """Batches that began with this version and have not ended."""

    @property
    def complete(self) -> bool:
        """Every stage has a replica."""
        return all(pool.open for pool in self.pools)

    @property
    def expired(self) -> bool:
        """Some stage has had no replica for longer than the grace."""
        return any(pool.expired for pool in self.pools)

    @property
    def choked(self) -> bool:
        """A later stage has enough waiting."""
        return any(pool.choked for pool in self.pools[1:])

    @property
    def isolation_choked(self) -> bool:
        """A later stage has a suspect waiting."""
        return any(pool.isolated for pool in self.pools[1:])
