"""The tensors of a simulated service: which worker keeps which output, who can fetch it, and which edges are cut.

Takes the driver's part (references, releases, requests whose input is lost) and the frontends' part (they keep the inputs of their
requests, and send a request again if a tensor of it is lost). All of it is idle in scenarios without edges.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from multiworld_serving.server.leader.scheduling.actions import KeepOutput, SendBatch
from multiworld_serving.server.leader.scheduling.events import BatchDone, BatchFailed, Event, RequestCancelled
from tests.simulation.workers import HEARTBEAT_TIMEOUT_S

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulator
    from tests.simulation.workers import Worker

FRONTENDS = ("f0", "f1")
_FETCH_TIMEOUT_S = 0.3


class DataPlane:
    """Edges between workers and frontends, and the references that the leader has."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._event_queue = simulator.event_queue
        self._random: Random = simulator.random_stream("edges")
        self._holders: dict[int, str] = {}
        """The link that keeps the input of a batch."""
        self._cut_until_s: dict[frozenset[str], float] = {}
        self._relayed: set[int] = set()
        """Requests whose tensors pass the leader, because one could not be fetched."""

    @property
    def idle(self) -> bool:
        """No output is retained."""
        return not any(worker.retained for worker in self._simulator.workers.values())

    # The driver.

    def holder_of(self, batch: int) -> str | None:
        """The link that keeps the input of the batch; None if it is sent with the batch."""
        return self._holders.get(batch)

    def keep_output(self, action: KeepOutput, event: Event) -> None:
        """Store the reference of the output that has just been computed, and release the previous input."""
        self.free(action.batch)
        if isinstance(event, BatchDone) and event.kept:
            self._holders[action.batch] = action.replica

    def free(self, batch: int) -> None:
        """Release the input of the batch."""
        if (holder := self._holders.pop(batch, None)) is not None:
            self.release(holder, batch)

    def release(self, link: str, batch: int) -> None:
        """Tell the worker of this link to free an output."""
        release = self._simulator.workers_by_link[link].release
        self._event_queue.after(self._delay_s(), partial(release, link, batch))

    def is_relayed(self, send: SendBatch) -> bool:
        """Whether all tensors of this batch pass the leader."""
        return not self._relayed.isdisjoint(send.requests)

    def lose_input(self, send: SendBatch) -> None:
        """End the requests of this batch. Their frontends send them again, and the leader relays their tensors."""
        for request in [each for each in send.requests if each in self._simulator.open and each not in self._relayed]:
            self._relayed.add(request)
            self._simulator.deliver(RequestCancelled(request))
            self._event_queue.after(self._delay_s(), partial(self._simulator.submit, request, "relay "))
        self._simulator.deliver(BatchFailed(send.batch, send.replica, "the input is lost", sent=False))

    # Edges.

    def cut(self, one: str, other: str, lasts_s: float) -> None:
        """Cut the edge between two workers, or a worker and a frontend."""
        self._cut_until_s[frozenset((one, other))] = self._event_queue.now_s + lasts_s

    def fetch(self, send: SendBatch, holder: str | None, worker: Worker, then: Callable[[bool], None]) -> None:
        """Get the input of a batch for this worker, and call `then` with the success. It fails within a bounded time."""
        if not self._simulator.scenario.edges or self.is_relayed(send) or (send.stage > 0 and holder is None):
            then(True)
        else:
            self._event_queue.after(self._delay_s(), partial(self._serve, send, holder, worker, then))

    def _serve(self, send: SendBatch, holder: str | None, worker: Worker, then: Callable[[bool], None]) -> None:
        if holder is None:
            frontends = {FRONTENDS[each % len(FRONTENDS)] for each in send.requests if each in self._simulator.open}
            found = not any(self._is_cut(frontend, worker.name) for frontend in frontends)
        else:
            producer = self._simulator.workers_by_link[holder]
            found = not self._is_cut(producer.name, worker.name) and producer.keeps(holder, send.batch)
            if producer.is_stopped and not found:  # noticed by the heartbeats of the edge
                self._event_queue.after(HEARTBEAT_TIMEOUT_S, partial(then, found))
                return
        delay_s = self._delay_s() if found else self._random.uniform(0.0, _FETCH_TIMEOUT_S)
        self._event_queue.after(delay_s, partial(then, found))

    def _is_cut(self, one: str, other: str) -> bool:
        return self._event_queue.now_s < self._cut_until_s.get(frozenset((one, other)), 0.0)

    def _delay_s(self) -> float:
        return self._simulator.message_delay_s(self._random)
