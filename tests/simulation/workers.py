"""Simulated workers: each computes one batch at a time and can fail in every way that a fault asks for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from multiworld_serving.server.leader.scheduling.actions import SendBatch
from multiworld_serving.server.leader.scheduling.events import (
    BatchDone,
    BatchFailed,
    ReplicaDraining,
    ReplicaLost,
    ReplicaReady,
)
from tests.simulation.scenarios import NETWORK_S, ROW_SHARE, WORK_S

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulator

HEARTBEAT_TIMEOUT_S = 0.5


class Worker:
    """A worker of one stage. Each time it joins it has a new link; the previous link never works again."""

    def __init__(self, simulator: Simulator, name: str, stage: int) -> None:
        self.name = name
        self.stage = stage
        self.version = 1
        self.generation = 0
        self.link = ""
        self.serving = False
        """The worker has joined and has not failed or left; the leader may not know yet."""
        self.leaving = False
        self.retained: dict[int, None] = {}
        """Batches whose output it keeps."""
        self._dies_after_reply = False
        self._slowdown = 1.0
        self._flapping = False
        self._raising = False
        self._frozen = False
        self._inbound_blocked_until_s = 0.0
        self._outbound_blocked_until_s = 0.0
        self._queue: deque[SendBatch] = deque()
        self._computing = False
        self._simulator = simulator
        self._scenario = simulator.scenario
        self._event_queue = simulator.event_queue
        self._random: Random = simulator.random_stream(name)

    def start(self) -> None:
        """Join over a new link."""
        if self.serving:
            return
        self.generation += 1
        self.link = f"{self.name}#{self.generation}"
        self.serving, self.leaving, self._frozen, self._computing = True, False, False, False
        self._inbound_blocked_until_s = self._outbound_blocked_until_s = 0.0
        self._queue.clear()
        self._dies_after_reply = False
        self._simulator.workers_by_link[self.link] = self
        self._simulator.deliver(ReplicaReady(self.link, self.stage, f"v{self.version}"))
        if self._flapping and self._random.random() < 0.3:
            self.kill()

    def receive(self, send: SendBatch, holder: str | None) -> None:
        """Receive a batch and fetch its input; ignored unless it was sent over the current link."""
        if self._is_current(send.replica) and not self._is_delayed(partial(self.receive, send, holder)):
            self._simulator.data_plane.fetch(send, holder, self, partial(self._input_fetched, send))

    def release(self, link: str, batch: int) -> None:
        """Free the output of a batch."""
        if self._is_current(link) and not self._is_delayed(partial(self.release, link, batch)):
            self.retained.pop(batch, None)

    def _is_delayed(self, arrive: Callable[[], None]) -> bool:
        """Whether a partition delays a message, which arrives when it heals."""
        is_delayed = self._event_queue.now_s < self._inbound_blocked_until_s
        if is_delayed:
            self._event_queue.at(self._inbound_blocked_until_s, arrive)
        return is_delayed

    @property
    def is_stopped(self) -> bool:
        """Whether it neither receives nor sends: its process is frozen, or its network is cut."""
        return self._event_queue.now_s < min(self._inbound_blocked_until_s, self._outbound_blocked_until_s)

    def keeps(self, link: str, batch: int) -> bool:
        """Whether the output of the batch can be fetched now."""
        blocked_until_s = max(self._inbound_blocked_until_s, self._outbound_blocked_until_s)
        return self._is_current(link) and self._event_queue.now_s >= blocked_until_s and batch in self.retained

    # Faults.

    def fail(self, cause: str, detected_after_s: float) -> None:
        """Break the current link. The worker joins again later."""
        if not self.serving:
            return
        self.serving = False
        self.retained.clear()
        report = partial(self._simulator.deliver, ReplicaLost(self.link, cause))
        self._event_queue.after(detected_after_s, report)
        if self._random.random() < 0.1:
            self._event_queue.after(2 * detected_after_s, report)
        self._recover_later()

    def kill(self) -> None:
        """Die. The leader sees it soon or, if the connection is not closed, after the heartbeat timeout."""
        closed = self._random.random() < 0.8
        self.fail("exit", self._random.uniform(0.0, 10 * NETWORK_S) if closed else HEARTBEAT_TIMEOUT_S)

    def kill_after_reply(self) -> None:
        """Die when the leader knows of the next output that stays here, before anyone can fetch it."""
        self._dies_after_reply = True

    def freeze(self) -> None:
        """Block computation for ever; heartbeats continue."""
        self._frozen = True

    def degrade(
        self, lasts_s: float = 0.0, *, slowdown: float = 1.0, flapping: bool = False, raising: bool = False
    ) -> None:
        """Compute slowly, die on every batch, or raise an exception on every batch, for `lasts_s`."""
        self._slowdown, self._flapping, self._raising = slowdown, flapping, raising
        if lasts_s:
            self._event_queue.after(lasts_s, self.degrade)

    def partition(self, lasts_s: float, *, to: bool, from_: bool) -> None:
        """Delay messages until the partition heals. A partition longer than the heartbeat timeout breaks the link."""
        heals_s = self._event_queue.now_s + lasts_s
        self._inbound_blocked_until_s = heals_s if to else self._inbound_blocked_until_s
        self._outbound_blocked_until_s = heals_s if from_ else self._outbound_blocked_until_s
        if lasts_s > HEARTBEAT_TIMEOUT_S:
            self._event_queue.after(HEARTBEAT_TIMEOUT_S, partial(self._give_up, self.link))

    def leave(self) -> None:
        """Start draining; the worker leaves when the scheduler sends `ReleaseReplica`."""
        if self.serving and not self.leaving:
            self.leaving = True
            self._simulator.deliver(ReplicaDraining(self.link))

    # Actions of the leader.

    def closed(self, link: str) -> None:
        """The leader closed this link."""
        if self._is_current(link):
            self.serving = False
            self.retained.clear()
            self._recover_later()

    def broken(self, link: str) -> None:
        """The leader broke the world of this link."""
        if self._is_current(link):
            self.fail("aborted", self._random.uniform(0.0, 20 * NETWORK_S))

    def _give_up(self, link: str) -> None:
        if self._is_current(link):
            self.fail("transport", 0.0)

    def _recover_later(self) -> None:
        mean_s = self._scenario.recovery_s
        down_s = self._random.expovariate(1 / mean_s) if self._scenario.recovery_varies else mean_s
        self._event_queue.after(down_s, self.start)

    def _is_current(self, link: str) -> bool:
        return self.serving and link == self.link

    def _input_fetched(self, send: SendBatch, found: bool) -> None:
        if not self._is_current(send.replica):
            return
        if found:
            self._queue.append(send)
            self._compute_next()
        else:
            self._report(partial(self._simulator.data_plane.lose_input, send))

    def _compute_next(self) -> None:
        if self._computing or self._frozen or not self._queue:
            return
        self._computing = True
        send = self._queue.popleft()
        self._event_queue.after(self._work_s(len(send.requests)), partial(self._finish, send))

    def _work_s(self, rows: int) -> float:
        """Log-normal; one in 200 takes eight times as long."""
        rare = 8.0 if self._random.random() < 0.005 else 1.0
        work_s = WORK_S * (1.0 + ROW_SHARE * (rows - 1)) * self._slowdown
        return work_s * self._random.lognormvariate(0.0, 0.3) * rare

    def _finish(self, send: SendBatch) -> None:
        if not self._is_current(send.replica) or self._frozen:
            return
        self._computing = False
        compute_outcome = self._compute_outcome(send)
        if compute_outcome == "kill" or self._flapping:
            self.kill()
        elif compute_outcome == "hang":
            self.freeze()
        else:
            self._reply(send, failed=compute_outcome == "raise" or self._raising)
            self._compute_next()

    def _compute_outcome(self, send: SendBatch) -> str:
        compute_outcome = self._simulator.compute_outcome_of(send)
        flaky = self._scenario.flaky
        return "raise" if compute_outcome == "answer" and flaky and self._random.random() < flaky else compute_outcome

    def _reply(self, send: SendBatch, *, failed: bool) -> None:
        if failed:
            self._report(partial(self._simulator.deliver, BatchFailed(send.batch, send.replica, "ValueError: no")))
            return
        kept = (
            self._scenario.edges
            and not self._simulator.data_plane.is_relayed(send)
            and len(self.retained) < self._scenario.max_retained
        )
        if kept:
            self.retained[send.batch] = None
        self._report(partial(self._announce, BatchDone(send.batch, send.replica, kept=kept)))

    def _announce(self, done: BatchDone) -> None:
        self._simulator.deliver(done)
        if done.kept and self._dies_after_reply and self._is_current(done.replica):
            self.kill()

    def _report(self, deliver: Callable[[], None]) -> None:
        leaves_s = max(self._event_queue.now_s, self._outbound_blocked_until_s)
        self._event_queue.at(leaves_s + self._simulator.message_delay_s(self._random), deliver)
