"""What becomes of a batch: it waits, begins again, is split, is answered or is refused."""

from __future__ import annotations

from server.scheduling.actions import Answer, ForgetBatch, Reason, Refuse, SendKind
from server.scheduling.backlog import Backlog
from server.scheduling.batches import Batch, Request
from server.scheduling.counters import Counters
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.drain_rate import DrainRate
from server.scheduling.events import RequestId
from server.scheduling.fleet import Fleet
from server.scheduling.hedging import Hedging
from server.scheduling.pools import Link
from server.scheduling.turn import Turn


class Outcomes:
    """Carries out what the scheduler has decided about a batch or a request, and keeps the accounts straight."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        turn: Turn,
        backlog: Backlog,
        fleet: Fleet,
        hedging: Hedging,
        drain_rate: DrainRate,
        counters: Counters,
    ) -> None:
        self._dispatcher = dispatcher
        self._turn = turn
        self._backlog = backlog
        self._fleet = fleet
        self._hedging = hedging
        self._drain_rate = drain_rate
        self._counters = counters

    def wait(self, batch: Batch, kind: SendKind, *, at_head: bool) -> None:
        """Into the line for its stage, unless that is hopeless."""
        batch.kind = kind
        pool = batch.pool
        if not pool.open and self._fleet.current is not None:
            self.restart(batch)
        elif pool.expired:
            self.refuse_all(batch, "no_replica", f"stage {batch.stage} has been without a replica for too long")
        else:
            pool.wait(batch, at_head=at_head)
            self._dispatcher.touch(pool)

    def restart(self, batch: Batch) -> None:
        """Its version has lost this stage and another one is complete: begin again, at the head of the queue."""
        requests = [request for _, request in batch.open_requests()]
        for request in reversed(requests):
            request.resends = batch.resends + 1
            self._backlog.put_back(request)
        self._counters.restarted += len(requests)
        self._forget(batch)

    def isolate(self, batch: Batch) -> None:
        """From now on each of its requests travels alone, beginning again at the first stage."""
        for _, request in batch.open_requests():
            request.resends = batch.resends + 1
            request.since_s = self._turn.now_s
            self._backlog.isolate(request)
            self._counters.isolated += 1
        self._forget(batch)

    def answer(self, batch: Batch, link: Link) -> None:
        """The last stage is done."""
        open_requests = list(batch.open_requests())
        rows = tuple((request.id, row) for row, request in open_requests)
        self._turn.actions.append(
            Answer(batch.id, link.id, rows, batch.pipeline.version, tuple(batch.path), 1 + batch.resends)
        )
        for _, request in open_requests:
            self._backlog.close(request)
            request.batch = None  # no reference cycle: nothing of it is left to the garbage collector
        self._counters.answered += len(rows)
        self._drain_rate.answered(len(rows), full=len(self._backlog.waiting) >= len(batch.rows))
        self._forget(batch)

    def refuse_all(self, batch: Batch, reason: Reason, detail: str) -> None:
        """Refuse every request of the batch that still wants an answer."""
        for _, request in list(batch.open_requests()):
            self.refuse(request, reason, detail)

    def refuse(self, request: Request, reason: Reason, detail: str) -> None:
        """Refuse an open request."""
        self.turn_away(request.id, reason, detail)
        self.close(request)

    def turn_away(self, request: RequestId, reason: Reason, detail: str, retry_after_s: float | None = None) -> None:
        """Refuse a request that is not, or not for much longer, among the open ones."""
        self._counters.refused[reason] += 1
        self._turn.actions.append(Refuse(request, reason, retry_after_s, detail))

    def close(self, request: Request) -> None:
        """Nobody waits for it any more. The last one of a batch takes the batch with it."""
        self._backlog.close(request)
        batch, request.batch = request.batch, None
        if batch is not None:
            batch.open_rows -= 1
            if not batch.open_rows:
                self._give_up(batch)

    def abandon_copies(self, batch: Batch, *, hedges: str) -> None:
        """What is still in flight of it only keeps its place in its link's window. `hedges`: what becomes of those."""
        for copy in batch.copies.values():
            self._hedging.forget(copy)
            if copy.kind == "hedge":
                self._counters.hedges[hedges] += 1
        batch.copies.clear()

    def _give_up(self, batch: Batch) -> None:
        batch.pool.withdraw(batch)
        self._dispatcher.touch(batch.pool)
        self.abandon_copies(batch, hedges="wasted")
        self._forget(batch)

    def _forget(self, batch: Batch) -> None:
        batch.pipeline.num_batches -= 1
        self._turn.actions.append(ForgetBatch(batch.id))
