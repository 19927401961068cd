"""Forms batches and sends them: what goes next, and where."""

from __future__ import annotations

from itertools import count

from server.scheduling.actions import SendBatch, SendKind
from server.scheduling.backlog import Backlog
from server.scheduling.batches import Batch, Copy, Request
from server.scheduling.config import SchedulerConfig
from server.scheduling.counters import Counters
from server.scheduling.fleet import Fleet
from server.scheduling.hedging import Hedging
from server.scheduling.pools import Link, Pipeline, Pool
from server.scheduling.turn import Turn
from server.scheduling.work_times import WorkTimes


class Dispatcher:
    """Moves work from the queue and the pools' lines onto links that have room."""

    def __init__(
        self,
        config: SchedulerConfig,
        turn: Turn,
        backlog: Backlog,
        fleet: Fleet,
        hedging: Hedging,
        times: WorkTimes,
        counters: Counters,
    ) -> None:
        self._turn = turn
        self._config = config
        self._backlog = backlog
        self._fleet = fleet
        self._hedging = hedging
        self._times = times
        self._counters = counters
        self._batch_ids = count(1)
        self._touched: dict[Pool, None] = {}
        self.hurry = False
        """No newcomers will come: do not wait for batches to fill."""

    def touch(self, pool: Pool) -> None:
        """Something about this pool has changed: look at it in the next dispatch."""
        self._touched[pool] = None

    def dispatch(self) -> None:
        """Send all that can go, last stages first because they make room for new batches."""
        touched, self._touched = self._touched, {}
        entry = self._fleet.entry
        if entry is not None:
            touched[entry] = None
        for pool in sorted(touched, key=_last_stage_first) if len(touched) > 1 else touched:
            self._serve(pool)

    def hedge(self) -> None:
        """Send a second copy of every batch that is late, where there is room and the budget allows it."""
        late: list[Copy] = []
        while (copy := self._hedging.late.pop_until(self._turn.now_s)) is not None:
            late.append(copy)
        for copy in late:
            if len(copy.batch.copies) == 1 and not self._hedge(copy):
                self._hedging.watch(copy, self._turn.now_s)
        if (
            self._fleet.entry is not None
        ):  # where the replica is taken that a batch waited for, another one may be nearly free
            self._form_batches(self._fleet.entry.pipeline)

    def next_batch_s(self) -> float | None:
        """When the queue's head has waited long enough; None if it waits for something else than time."""
        oldest, entry = self._backlog.oldest(), self._fleet.entry
        if oldest is None or entry is None or entry.pipeline.choked or (link := entry.available.first()) is None:
            return None
        return self._due_s(oldest, link)

    def _serve(self, pool: Pool) -> None:
        if pool.isolated_first:
            self._serve_isolated(pool)
        self._serve_retries(pool)
        self._serve_line(pool)
        if pool is self._fleet.entry:
            self._form_batches(pool.pipeline)
        self._serve_isolated(pool)
        pool.isolated_first = True

    def _serve_retries(self, pool: Pool) -> None:
        for batch in tuple(pool.retries.values()):
            if not len(pool.available):
                return
            # One that cannot go where there is room lets the others pass.
            link = pool.available.first(excluding=batch.failed_on)
            if link is not None:
                del pool.retries[batch.id]
                self._send(batch, link)

    def _serve_line(self, pool: Pool) -> None:
        while pool.line and (link := pool.available.first()) is not None:
            self._send(pool.line.popitem(last=False)[1], link)

    def _form_batches(self, pipeline: Pipeline) -> None:
        available = pipeline.pools[0].available
        while not pipeline.choked and (link := available.first()) is not None and self._batch_due(link):
            self._send(self._form(self._backlog.take(self._config.max_batch_size), pipeline), link)

    def _batch_due(self, link: Link) -> bool:
        """Whether a batch is to go out over this link, the least loaded of those that have room."""
        oldest = self._backlog.oldest()
        if oldest is None:
            return False
        full = len(self._backlog.waiting) >= self._config.max_batch_size
        return full or self.hurry or self._turn.now_s >= self._due_s(oldest, link)

    def _due_s(self, oldest: Request, link: Link) -> float:
        """When a batch that is not full goes out. Until the replica is nearly free, waiting for more costs nothing."""
        due_s = oldest.arrived_s + self._config.batch_timeout_s
        if not self._config.adaptive_batching:
            return due_s
        if not link.copies:
            return oldest.arrived_s
        nearly_free_s = self._times.nearly_free_s(link)
        return due_s if nearly_free_s is None else max(due_s, nearly_free_s - self._config.batch_timeout_s)

    def _serve_isolated(self, pool: Pool) -> None:
        newcomers = pool is self._fleet.entry and self._backlog.isolated and not pool.pipeline.isolation_choked
        if not pool.isolated and not newcomers:
            if pool.reserved is not None and not _carries_suspect(pool.reserved):
                pool.release()
            return
        link = pool.reserve()
        if link is None or link.copies:
            return
        if pool.isolated:
            self._send(pool.isolated.popitem(last=False)[1], link)
        else:
            self._send(self._form(self._backlog.take_isolated(), pool.pipeline), link)

    def _form(self, requests: tuple[Request, ...], pipeline: Pipeline) -> Batch:
        batch = Batch(
            id=next(self._batch_ids),
            rows=requests,
            pipeline=pipeline,
            isolated=requests[0].isolated,
            resends=max(request.resends for request in requests),
            since_s=requests[0].since_s,
            open_rows=len(requests),
        )
        for request in requests:
            request.batch = batch
        pipeline.num_batches += 1
        self._counters.batches += 1
        return batch

    def _hedge(self, late: Copy) -> bool:
        pool = late.link.pool
        link = pool.available.first(excluding=late.link)
        if link is None or not self._hedging.pay(len(late.batch.rows)):
            return False
        self._put_in_flight(late.batch, link, "hedge", waited_s=self._turn.now_s - late.sent_s)
        self._counters.hedge_rows_sent += len(late.batch.rows)
        return True

    def _send(self, batch: Batch, link: Link) -> None:
        rows = len(batch.rows)
        if batch.kind == "reroute":
            batch.resends += 1
            self._counters.reroutes[batch.stage] += 1
        elif batch.kind == "retry":
            batch.resends += 1
            self._counters.retries[batch.stage] += 1
        self._put_in_flight(batch, link, batch.kind, waited_s=self._turn.now_s - batch.since_s)
        self._counters.rows_sent += rows
        self._hedging.earn(rows)

    def _put_in_flight(self, batch: Batch, link: Link, kind: SendKind, *, waited_s: float) -> None:
        copy = Copy(batch, link, kind, self._turn.now_s)
        batch.copies[link.id] = copy
        self._fleet.sent(copy)
        if kind != "hedge":
            self._hedging.watch(copy, self._turn.now_s)
        self._turn.actions.append(
            SendBatch(
                batch=batch.id,
                stage=batch.stage,
                link=link.id,
                requests=tuple(request.id for request in batch.rows),
                version=batch.pipeline.version,
                kind=kind,
                attempt=1 + batch.resends,
                isolated=batch.isolated,
                waited_s=waited_s,
            )
        )


def _carries_suspect(link: Link) -> bool:
    return any(copy.batch.isolated for copy in link.copies.values())


def _last_stage_first(pool: Pool) -> int:
    return -pool.stage
