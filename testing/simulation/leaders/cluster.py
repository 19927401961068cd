"""Simulated leaders, the workers that they share, and the links of frontends to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any, cast

import torch

from multiworld_serving.common.config.addresses import Address
from multiworld_serving.server.errors import RequestRejected
from multiworld_serving.server.frontends.frames import Frame, FrameKind
from multiworld_serving.server.frontends.leader_link import LeaderLink, LeaderLostError
from multiworld_serving.server.frontends.leader_pool import LeaderPool
from multiworld_serving.server.frontends.messages import LeaderState, prediction_fields, row_payload
from multiworld_serving.server.predictor import ModelVersion, Prediction
from multiworld_serving.server.scheduling.scheduler import (
    Answer,
    BatchDone,
    Event,
    FailReplica,
    Reject,
    ReplicaLost,
    ReplicaReady,
    RequestArrived,
    RequestCancelled,
    Scheduler,
    SchedulerConfig,
    SendBatch,
    Tick,
)
from multiworld_serving.server.snapshots import PipelineSnapshot

HEARTBEAT_TIMEOUT_S = 1.0
_NETWORK_S = 0.0005
_WORK_S = 0.01
_JOIN_S = (0.05, 0.3)
_RESTART_S = (1.0, 2.0)
_VERSION = ModelVersion(1, "v1")

Trail = list[tuple[int, str]]
"""The submissions of a request: number of the leader, and the result: "answered", "lost", "left", "timeout" or a reason."""


class Cluster:
    """The leaders and workers of one run.

    Attributes:
        late_answers: answers that arrived after their link had ended.
        poison: numbers of the requests that kill each leader.
    """

    def __init__(self, seed: str, *, leaders: int, replicas: int, config: SchedulerConfig) -> None:
        self.loop = asyncio.get_running_loop()
        self.random = Random(seed)
        self.config = config
        self.late_answers = 0
        self.poison: set[int] = set()
        self.workers = [Worker(self, stage) for stage in range(config.num_stages) for _ in range(replicas)]
        self.leaders = [Leader(self, number) for number in range(leaders)]
        for leader in self.leaders:
            leader.start()

    def later(self, low_s: float, high_s: float, do: Callable[[], object]) -> None:
        """Call `do` after a random time."""
        self.loop.call_later(self.random.uniform(low_s, high_s), do)

    def message(self, do: Callable[[], object]) -> None:
        """Call `do` after the delay of one message."""
        self.loop.call_later(self.random.expovariate(1 / _NETWORK_S), do)


class Worker:
    """A worker of one stage. It computes the batches of all leaders one after another."""

    def __init__(self, cluster: Cluster, stage: int) -> None:
        self.stage = stage
        self.life = 0
        self.alive = True
        self._cluster = cluster
        self._free_s = 0.0

    def compute(self, leader: Leader, send: SendBatch) -> None:
        """Compute a batch, unless the worker dies before the end."""
        now_s, life = self._cluster.loop.time(), self.life
        self._free_s = max(now_s, self._free_s) + _WORK_S * self._cluster.random.lognormvariate(0.0, 0.3)

        def done() -> None:
            if self.life == life:
                leader.receive(partial(leader.batch_done, send.batch, send.replica))

        self._cluster.loop.call_at(self._free_s, done)

    def kill(self) -> None:
        """Die, and join all leaders again after the restart."""
        if self.alive:
            self.alive, self.life, self._free_s = False, self.life + 1, 0.0
            for leader in self._cluster.leaders:
                leader.receive(partial(leader.lose_worker, self, "exit"))
            self._cluster.later(*_RESTART_S, self._start)

    def _start(self) -> None:
        self.alive = True
        for leader in self._cluster.leaders:
            leader.invite(self)


class Leader:
    """A leader process: a scheduler, its replicas, and the sessions of the frontends.

    Attributes:
        life: number of the process; a restart begins the next one.
        open: session, link generation and request by the scheduler's number of the request.
    """

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.alive = False
        self.life = 0
        self.links: list[SimulatedLink] = []
        self.open: dict[int, tuple[SimulatedLink, int, int, int]] = {}
        self.scheduler = Scheduler(cluster.config)
        self._replicas: dict[str, Worker] = {}
        self._joined = 0
        self._requests = 0
        self._frozen_until_s = self._cut_until_s = 0.0
        self._ready = False

    @property
    def reachable(self) -> bool:
        """Whether it runs and the network to it works."""
        return self.alive and max(self._frozen_until_s, self._cut_until_s) <= self.cluster.loop.time()

    @property
    def ready(self) -> bool:
        """Whether every stage has a replica."""
        return len({worker.stage for worker in self._replicas.values()}) == self.cluster.config.num_stages

    def start(self) -> None:
        """Start a new process."""
        self.alive, self.life, self._ready = True, self.life + 1, False
        self._replicas, self.open = {}, {}
        self.scheduler = Scheduler(self.cluster.config)
        for worker in self.cluster.workers:
            self.invite(worker)
        for link in self.links:
            link.join_later()

    def invite(self, worker: Worker) -> None:
        """Let a worker join after a random time, when the leader is reachable."""
        life = worker.life

        def join() -> None:
            if worker.life != life or not worker.alive or not self.alive:
                return
            if not self.reachable:
                self.cluster.later(*_JOIN_S, join)
                return
            if worker in self._replicas.values():
                return
            self._joined += 1
            replica = f"{self.number}#{self._joined}"
            self._replicas[replica] = worker
            self.handle(ReplicaReady(replica, worker.stage, _VERSION.name))

        self.cluster.later(*_JOIN_S, join)

    # -- faults ----------------------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """End the process. Frontends notice at once; it is restarted after a second or two."""
        if self.alive:
            self.alive = False
            for link in self.links:
                self.cluster.message(partial(link.lose, link.generation))
            self.cluster.later(*_RESTART_S, self.start)

    def freeze(self, lasts_s: float) -> None:
        """Stop the process; what arrives meanwhile is handled afterwards."""
        self._frozen_until_s = max(self._frozen_until_s, self.cluster.loop.time() + lasts_s)
        self._miss_heartbeats(lasts_s)

    def cut(self, lasts_s: float) -> None:
        """Delay all messages from and to it."""
        self._cut_until_s = max(self._cut_until_s, self.cluster.loop.time() + lasts_s)
        self._miss_heartbeats(lasts_s)

    def _miss_heartbeats(self, lasts_s: float) -> None:
        if lasts_s <= HEARTBEAT_TIMEOUT_S:
            return
        life = self.life
        for link in self.links:
            self.cluster.loop.call_later(HEARTBEAT_TIMEOUT_S, partial(link.lose, link.generation))
        workers = set(self._replicas.values())

        def lose_workers() -> None:
            if self.life == life:
                for worker in workers:
                    self._when_running(partial(self.lose_worker, worker, "hang"))
                    self.invite(worker)

        self.cluster.loop.call_later(HEARTBEAT_TIMEOUT_S, lose_workers)

    # -- what arrives ----------------------------------------------------------------------------------------------------------

    def receive(self, do: Callable[[], object]) -> None:
        """Handle a message when it arrives and the process runs; never, if the process has ended."""
        life = self.life

        def arrive() -> None:
            if self.alive and self.life == life:
                if self._cut_until_s > self.cluster.loop.time():
                    self.cluster.loop.call_at(self._cut_until_s, arrive)
                else:
                    self._when_running(do)

        self.cluster.message(arrive)

    def _when_running(self, do: Callable[[], object]) -> None:
        life = self.life

        def proceed() -> None:
            if not self.alive or self.life != life:
                return
            if self._frozen_until_s > self.cluster.loop.time():
                self.cluster.loop.call_at(self._frozen_until_s, proceed)
            else:
                do()

        proceed()

    def submit(self, link: SimulatedLink, generation: int, number: int, request: int, timeout_s: float) -> None:
        """A request arrives over a link."""
        if link.generation != generation:
            return
        if request in self.cluster.poison:
            self.kill()
            return
        self._requests += 1
        self.open[self._requests] = (link, generation, number, request)
        self.handle(RequestArrived(self._requests, self.cluster.loop.time() + timeout_s))

    def withdraw(self, link: SimulatedLink, generation: int, number: int | None = None) -> None:
        """A frontend cancels a request, or all requests of a link that has ended."""
        for own, (its_link, its_generation, its_number, _) in list(self.open.items()):
            if (its_link, its_generation) == (link, generation) and number in (None, its_number):
                del self.open[own]
                self.handle(RequestCancelled(own))

    def session_ended(self, link: SimulatedLink, generation: int) -> None:
        """The link ended while the process ran: it notices when it runs again."""
        self.cluster.later(0.0, 0.01, partial(self._when_running, partial(self.withdraw, link, generation)))

    def batch_done(self, batch: int, replica: str) -> None:
        if replica in self._replicas:
            self.handle(BatchDone(batch, replica))

    def lose_worker(self, worker: Worker, cause: str) -> None:
        """The worlds of a worker broke."""
        for replica in [each for each, its in self._replicas.items() if its is worker]:
            del self._replicas[replica]
            self.handle(ReplicaLost(replica, cause))

    def handle(self, event: Event) -> None:
        """Pass an event to the scheduler and perform the actions."""
        loop = self.cluster.loop
        for action in self.scheduler.handle(event, loop.time()):
            match action:
                case SendBatch():
                    if action.replica in self._replicas:
                        worker = self._replicas[action.replica]
                        self.cluster.message(partial(worker.compute, self, action))
                case Answer():
                    for own, _ in action.rows:
                        self._reply(own, None)
                case Reject():
                    rejection = RequestRejected.for_reason(
                        action.reason, action.detail, retry_after_s=action.retry_after_s
                    )
                    self._reply(action.request, rejection)
                case FailReplica() if action.replica in self._replicas:
                    self.invite(self._replicas.pop(action.replica))
        if (wakeup_s := self.scheduler.next_wakeup_s()) is not None:
            loop.call_at(max(wakeup_s, loop.time()), partial(self._tick, wakeup_s, self.life))
        if self._ready != self.ready:
            self._ready = self.ready
            for link in self.links:
                self.cluster.message(partial(link.tell, link.generation))

    def _tick(self, wakeup_s: float, life: int) -> None:
        if self.alive and self.life == life and self.scheduler.next_wakeup_s() == wakeup_s:
            self._when_running(partial(self.handle, Tick()))

    def _reply(self, own: int, rejection: RequestRejected | None) -> None:
        if own not in self.open:
            return
        link, generation, number, request = self.open.pop(own)

        def arrive() -> None:
            if self._cut_until_s > self.cluster.loop.time():
                self.cluster.loop.call_at(self._cut_until_s, arrive)
            else:
                link.reply(generation, number, rejection or _answer(request))

        self.cluster.message(arrive)


class SimulatedLink(LeaderLink):
    """A frontend's link to a simulated leader.

    Attributes:
        generation: number of the world; replies over an earlier one are discarded.
        trails: submissions by request, shared by all links.
    """

    def __init__(self, leader: Leader, pool: LeaderPool, trails: dict[int, Trail]) -> None:
        none = cast(Any, None)
        super().__init__(Address("leader", 8000 + leader.number), none, none, pool)
        self.name = f"leader-{leader.number}"
        self.leader = leader
        self.generation = 0
        self.trails = trails
        leader.links.append(self)
        self.join_later()

    def join_later(self) -> None:
        """Try to join until it works."""
        self.leader.cluster.later(*_JOIN_S, self._join)

    def _join(self) -> None:
        if self.state is not None:
            return
        if not self.leader.reachable:
            self.join_later()
            return
        self.generation += 1
        self._tell()

    def tell(self, generation: int) -> None:
        """The leader's current state arrives."""
        if generation == self.generation and self.state is not None:
            self._tell()

    def _tell(self) -> None:
        ready = self.leader.ready
        snapshot = PipelineSnapshot("m", _VERSION.name, ready, False, 0.0, 0, 0, ())
        self.state = LeaderState(self.name or "", "host", 1, _VERSION, None, 0, ready, None, snapshot)
        self.was_ready |= ready
        self._events.on_state(self)

    def lose(self, generation: int) -> None:
        """The world broke."""
        if generation == self.generation and self.state is not None:
            self.generation += 1
            self._on_lost("lost", failed=True)
            self.leader.session_ended(self, generation)
            self.join_later()

    def reply(self, generation: int, number: int, result: Frame | RequestRejected) -> None:
        """A reply arrives. Over a world that has ended it cannot arrive."""
        if generation != self.generation:
            self.leader.cluster.late_answers += isinstance(result, Frame)
            return
        future = self._pending.get(number)
        if future is None or future.done():
            return
        if isinstance(result, Frame):
            future.set_result(result)
        else:
            future.set_exception(result)

    async def request(
        self, kind: FrameKind, fields: Mapping[str, Any], payload: memoryview | bytes = b"", *, timeout_s: float
    ) -> Frame:
        """See `LeaderLink.request`."""
        assert self.state is not None, "a request was sent to a leader that is not connected"
        request, generation, number = int(fields["request_id"]), self.generation, next(self._numbers)
        trail = self.trails.setdefault(request, [])
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        result = "answered"
        try:
            submit = partial(self.leader.submit, self, generation, number, request, fields["timeout_s"])
            self.leader.receive(submit)
            async with asyncio.timeout(timeout_s):
                return await future
        except LeaderLostError as lost:
            result = "lost" if lost.failed else "left"
            raise
        except RequestRejected as rejection:
            result = rejection.reason
            raise
        except TimeoutError:
            result = "timeout"
            raise
        finally:
            trail.append((self.leader.number, result))
            del self._pending[number]
            if result == "timeout":
                self.leader.receive(partial(self.leader.withdraw, self, generation, number))


def _answer(request: int) -> Frame:
    """The answer of a request, from which the request can be seen."""
    probabilities = torch.tensor([float(request)])
    found = Prediction(probabilities, "m", _VERSION.name, 0.0, 0.0, 0.0, 1, ("w",), 1, _VERSION.number)
    return Frame(FrameKind.PREDICTION, 1, prediction_fields(found), memoryview(bytearray(row_payload(found.output))))
