"""The tensors of a simulated service: which worker keeps which output, who can fetch it, and which edges are cut.

Takes the driver's part (references, releases, requests that are handed back) and the frontends' part (they keep the inputs of their
requests). All of it is idle in scenarios without edges.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from multiworld_serving.server.leader.scheduling.actions import KeepOutput, SendBatch
from multiworld_serving.server.leader.scheduling.events import BatchDone, Event, InputLost
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
        self._relayed: set[str] = set()
        """Producers from which a worker could not fetch. Their outputs come with the results until they join again."""

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

    def is_relayed(self, producer: str) -> bool:
        """Whether the outputs of this worker come with the results, because somebody could not fetch one."""
        return producer in self._relayed

    def forget(self, worker: str) -> None:
        """The worker joins again: edges to it are tried again."""
        self._relayed.discard(worker)

    def lose_input(self, event: InputLost, requests: tuple[int, ...], worker: Worker) -> None:
        """Hand the requests that this worker cannot get back to their frontends, then report the loss."""
        if (holder := self._holders.get(event.batch)) is not None:
            self._relayed.add(self._simulator.workers_by_link[holder].name)
        for request in self._unreachable(requests, worker):
            self._simulator.cancel(request, "handed_back")
        self._simulator.deliver(event)

    # Edges.

    def cut(self, one: str, other: str, lasts_s: float) -> None:
        """Cut the edge between two workers, or a worker and a frontend."""
        self._cut_until_s[frozenset((one, other))] = self._event_queue.now_s + lasts_s

    def fetch(self, send: SendBatch, holder: str | None, worker: Worker, then: Callable[[bool], None]) -> None:
        """Get the input of a batch for this worker, and call `then` with the success. It fails within a bounded time."""
        if not self._simulator.scenario.edges or (send.stage > 0 and holder is None):
            then(True)
        else:
            self._event_queue.after(self._delay_s(), partial(self._serve, send, holder, worker, then))

    def _serve(self, send: SendBatch, holder: str | None, worker: Worker, then: Callable[[bool], None]) -> None:
        if holder is None:
            found = not self._unreachable(send.requests, worker)
        else:
            producer = self._simulator.workers_by_link[holder]
            found = not self._is_cut(producer.name, worker.name) and producer.keeps(holder, send.batch)
            if producer.is_stopped and not found:  # noticed by the heartbeats of the edge
                self._event_queue.after(HEARTBEAT_TIMEOUT_S, partial(then, found))
                return
        delay_s = self._delay_s() if found else self._random.uniform(0.0, _FETCH_TIMEOUT_S)
        self._event_queue.after(delay_s, partial(then, found))

    def _unreachable(self, requests: tuple[int, ...], worker: Worker) -> list[int]:
        """Open requests whose frontend this worker cannot reach."""
        open_requests = self._simulator.open
        frontends = {request: FRONTENDS[request % len(FRONTENDS)] for request in requests if request in open_requests}
        return [request for request, frontend in frontends.items() if self._is_cut(frontend, worker.name)]

    def _is_cut(self, one: str, other: str) -> bool:
        return self._event_queue.now_s < self._cut_until_s.get(frozenset((one, other)), 0.0)

    def _delay_s(self) -> float:
        return self._simulator.message_delay_s(self._random)
