"""The tensors of a simulated service: which worker keeps which output, who fetches it, and which edges are cut.

Takes the driver's part (references, releases, requests that are handed back) and the frontends' part (they keep the inputs of their
requests, and fetch answers). All of it is idle in scenarios without edges.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from multiworld_serving.server.scheduling.actions import Answer, KeepOutput, SendBatch
from multiworld_serving.server.scheduling.events import BatchDone, Event, InputLost

if TYPE_CHECKING:
    from multiworld_serving.testing.simulation.simulator import Simulator
    from multiworld_serving.testing.simulation.workers import Worker

FRONTENDS = ("f0", "f1")
_FETCH_TIMEOUT_S = 0.3
_AGAIN = 10_000_000
"""Added to the id of a request each time that its frontend sends it again. Such a request brings its input."""


class DataPlane:
    """Edges between workers and frontends, and the references that the leader has."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._event_queue = simulator.event_queue
        self._random: Random = simulator.random_stream("edges")
        self._holders: dict[int, str] = {}
        """The link that keeps the input of a batch."""
        self._cut_until_s: dict[frozenset[str], float] = {}
        self._relayed: dict[str, set[str]] = {}
        """Producers, and the consumers that could not fetch from them since one of the two has joined."""
        self._deliveries = 0
        """Answers and requests on their way from or to a frontend."""

    @property
    def idle(self) -> bool:
        """No output is retained, no answer is being fetched, and no request is about to be sent again."""
        return not self._deliveries and not any(worker.retained for worker in self._simulator.workers.values())

    # The driver.

    def holder_of(self, batch: int) -> str | None:
        """The link that keeps the input of the batch; None if it is sent with the batch."""
        return self._holders.get(batch)

    def keep_output(self, action: KeepOutput, event: Event) -> None:
        """Store the reference of the output that has just been computed, and release the previous input."""
        self.free(action.batch)
        if _is_kept(event):
            self._holders[action.batch] = action.replica

    def free(self, batch: int) -> None:
        """Release the input of the batch."""
        if (holder := self._holders.pop(batch, None)) is not None:
            self.release(holder, batch)

    def release(self, link: str, batch: int) -> None:
        """Tell the worker of this link to free an output."""
        release = self._simulator.workers_by_link[link].release
        self._event_queue.after(self._delay_s(), partial(release, link, batch))

    def answer(self, action: Answer, event: Event) -> None:
        """Answer the requests. If the output stays at the worker, their frontends fetch it there."""
        if _is_kept(event):
            self._deliveries += 1
            self._event_queue.after(2 * self._delay_s(), partial(self._fetch_answer, action))
        else:
            for request, _ in action.rows:
                self._simulator.close(request, "answered")

    def is_relayed(self, producer: str) -> bool:
        """Whether the outputs of this worker come with the results, because somebody could not fetch one."""
        return producer in self._relayed

    def forget(self, worker: str) -> None:
        """The worker joins again: edges from and to it are tried again."""
        self._relayed.pop(worker, None)
        for producer in [producer for producer, consumers in self._relayed.items() if consumers == {worker}]:
            del self._relayed[producer]
        for consumers in self._relayed.values():
            consumers.discard(worker)

    def lose_input(self, event: InputLost, requests: tuple[int, ...], worker: Worker) -> None:
        """Hand the requests that this worker cannot get back to their frontends, then report the loss."""
        if (holder := self._holders.get(event.batch)) is not None:
            self._relayed.setdefault(self._simulator.workers_by_link[holder].name, set()).add(worker.name)
        for request in self._unreachable(requests, worker):
            self._resubmit(request)
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
        delay_s = self._delay_s() if found else self._random.uniform(0.0, _FETCH_TIMEOUT_S)
        self._event_queue.after(delay_s, partial(then, found))

    def _fetch_answer(self, action: Answer) -> None:
        self._deliveries -= 1
        worker = self._simulator.workers_by_link[action.replica]
        kept = worker.keeps(action.replica, action.batch)
        for request in [request for request, _ in action.rows if request in self._simulator.open]:
            if kept and not self._is_cut(_frontend_of(request), worker.name):
                self._simulator.close(request, "answered")
            else:
                self._relayed.setdefault(worker.name, set()).add(_frontend_of(request))
                self._resubmit(request)
        self.release(action.replica, action.batch)

    def _resubmit(self, request: int) -> None:
        """Its frontend sends the request again, with its input and a new id."""
        self._simulator.hand_back(request)
        self._deliveries += 1
        self._event_queue.after(self._delay_s(), partial(self._arrive_again, request))

    def _arrive_again(self, request: int) -> None:
        self._deliveries -= 1
        self._simulator.arrive_again(request, request + _AGAIN)

    def _unreachable(self, requests: tuple[int, ...], worker: Worker) -> list[int]:
        """Open requests whose frontend this worker cannot reach; never those that came with their input."""
        open_requests = self._simulator.open
        return [
            request
            for request in requests
            if request < _AGAIN and request in open_requests and self._is_cut(_frontend_of(request), worker.name)
        ]

    def _is_cut(self, one: str, other: str) -> bool:
        return self._event_queue.now_s < self._cut_until_s.get(frozenset((one, other)), 0.0)

    def _delay_s(self) -> float:
        return self._simulator.message_delay_s(self._random)


def _frontend_of(request: int) -> str:
    return FRONTENDS[request % len(FRONTENDS)]


def _is_kept(event: Event) -> bool:
    return isinstance(event, BatchDone) and event.kept
