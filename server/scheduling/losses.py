"""What a link takes with it when it goes, and what becomes of that."""

from __future__ import annotations

from server.scheduling.actions import CloseLink
from server.scheduling.batches import Batch, Copy
from server.scheduling.config import SchedulerConfig
from server.scheduling.counters import Counters
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.scheduling.hedging import Hedging
from server.scheduling.outcomes import Outcomes
from server.scheduling.pools import Link, Pool
from server.scheduling.turn import Turn


class Losses:
    """Takes back what was in flight on a broken link, keeps the count of broken worlds, and sees to it that nothing
    waits where no replica will come."""

    def __init__(
        self,
        config: SchedulerConfig,
        dispatcher: Dispatcher,
        outcomes: Outcomes,
        turn: Turn,
        fleet: Fleet,
        hedging: Hedging,
        counters: Counters,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._outcomes = outcomes
        self._turn = turn
        self._fleet = fleet
        self._hedging = hedging
        self._counters = counters

    def break_link(self, link: Link, cause: str) -> None:
        """The link is gone. What was in flight there goes to the head of the line, or, when its requests have broken
        too many worlds, is split or refused."""
        blames = cause != "left" and not link.draining
        self._fleet.remove(link, self._turn.now_s)
        self.fleet_changed()
        lost = reversed(link.copies.values())
        suspects = [copy.batch for copy in lost if copy.detach() and self._lost(copy, blames=blames)]
        for batch in reversed(suspects):
            self._outcomes.isolate(batch)

    def close_if_drained(self, link: Link) -> None:
        """Let a leaving worker go when it has finished what it had."""
        if link.draining and not link.copies:
            self._fleet.remove(link, self._turn.now_s)
            self.fleet_changed()
            self._turn.actions.append(CloseLink(link.id))

    def other_copy_remains(self, copy: Copy, *, suspect: bool = False) -> bool:
        """This copy came to nothing. Is another one on its way? Then that one is watched in turn, unless it is of a
        suspect: to hedge that again and again would break one world after the other."""
        if copy.kind == "hedge":
            self._counters.hedges["wasted"] += 1
        for other in copy.batch.copies.values() if not suspect else ():
            self._hedging.watch(other, self._turn.now_s)
        return bool(copy.batch.copies)

    def fleet_changed(self) -> None:
        """To be called after links came or went."""
        for pipeline in self._fleet.pipelines.values():
            for pool in pipeline.pools:
                self._dispatcher.touch(pool)
                self._unstrand(pool)
        self._fleet.forget_versions()

    def _lost(self, copy: Copy, *, blames: bool) -> bool:
        """The copy's link broke before it answered. True if its batch is to be split."""
        batch = copy.batch
        self._hedging.forget(copy)
        worlds_broken = self._worlds_broken(batch, one_more=blames)
        suspect = worlds_broken >= self._config.max_attempts - 1
        if self.other_copy_remains(copy, suspect=suspect):
            return False
        if not batch.isolated and suspect:
            return True
        if batch.isolated and blames and worlds_broken >= self._config.max_attempts:
            detail = f"it broke {worlds_broken} worlds, the last one alone"
            self._outcomes.refuse_all(batch, "poison", detail)
        else:
            batch.since_s = self._turn.now_s
            batch.failed_on = None
            self._outcomes.wait(batch, "reroute", at_head=True)
        return False

    def _worlds_broken(self, batch: Batch, *, one_more: bool) -> int:
        """Count a broken world against every request of the batch, if it is to blame. Returns the highest count."""
        highest = 0
        for _, request in batch.open_requests():
            request.worlds_broken += one_more
            highest = max(highest, request.worlds_broken)
        return highest

    def _unstrand(self, pool: Pool) -> None:
        """Waiting for a replica makes no sense here any more: another version is complete, or a retry has no other
        replica to go to."""
        stranded: list[Batch] = []
        if not pool.open and self._fleet.current is not None:
            stranded = pool.batches()
        elif len(pool.open) == 1:
            stranded = [batch for batch in pool.retries.values() if not pool.has_other(batch.failed_on)]
        for batch in reversed(stranded):
            pool.withdraw(batch)
            if pool.open:
                self._outcomes.isolate(batch)
            else:
                self._outcomes.restart(batch)
