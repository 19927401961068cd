"""Simulated workers: they compute one batch after the other, and come to grief in every way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from server.scheduler import BatchDone, BatchFailed, LinkBroken, LinkDraining, LinkReady, SendBatch

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulator

_NETWORK_S = 0.0005
_HEARTBEAT_TIMEOUT_S = 0.5


class Worker:
    """A slot that serves one stage, in one incarnation (link) after the other."""

    def __init__(self, simulator: Simulator, name: str, stage: int) -> None:
        self.name = name
        self.stage = stage
        self.version = 1
        self.epoch = 0
        self.link = ""
        self.serving = False
        """Alive, in its own eyes."""
        self.leaving = False
        self.slowness = 1.0
        self.flapping = False
        self._frozen = False
        self._held_until_s = 0.0
        self._queue: deque[SendBatch] = deque()
        self._computing = False
        self._simulator = simulator
        self._agenda = simulator.agenda
        self._random: Random = simulator.random

    def start(self) -> None:
        """Join as a new incarnation."""
        if self.serving:
            return
        self.epoch += 1
        self.link = f"{self.name}#{self.epoch}"
        self.serving, self.leaving, self._frozen, self._computing = True, False, False, False
        self._held_until_s = 0.0
        self._queue.clear()
        self._simulator.workers_by_link[self.link] = self
        self._simulator.deliver(LinkReady(self.link, self.stage, f"v{self.version}"))

    def receive(self, send: SendBatch) -> None:
        """A batch comes in over the incarnation that it names."""
        if self._lives(send.link):
            self._queue.append(send)
            self._compute_next()

    def die(self, cause: str, detected_after_s: float) -> None:
        """This incarnation ends; a new one comes some time later."""
        if not self.serving:
            return
        self.serving = False
        link = self.link
        self._agenda.after(detected_after_s, lambda: self._simulator.deliver(LinkBroken(link, cause)))
        if self._random.random() < 0.1:
            self._agenda.after(2 * detected_after_s, lambda: self._simulator.deliver(LinkBroken(link, cause)))
        self._agenda.after(self._random.expovariate(1 / self._simulator.scenario.recovery_s), self.start)

    def kill(self) -> None:
        self.die("exit", self._random.uniform(0.0, 0.005))

    def stop(self) -> None:
        """The process stands still and its heartbeats stop."""
        self.die("hang", _HEARTBEAT_TIMEOUT_S)

    def freeze(self) -> None:
        """Computing never returns; the rest of the process lives."""
        self._frozen = True

    def slow_down(self) -> None:
        self.slowness = self._random.choice([3.0, 10.0, 30.0])
        self._agenda.after(self._random.uniform(0.5, 5.0), self._recover)

    def flap(self) -> None:
        self.flapping = True
        self._agenda.after(self._random.uniform(0.5, 5.0), self._recover)

    def hold_up(self) -> None:
        """Cut off: answers arrive when the partition heals, if the link lives so long."""
        held_s = self._random.uniform(0.0, 2 * _HEARTBEAT_TIMEOUT_S)
        self._held_until_s = self._agenda.now_s + held_s
        if held_s > _HEARTBEAT_TIMEOUT_S:
            self.die("transport", _HEARTBEAT_TIMEOUT_S)

    def leave(self) -> None:
        """Finish what is there, then go; `CloseLink` says when."""
        if self.serving and not self.leaving:
            self.leaving = True
            self._simulator.deliver(LinkDraining(self.link))

    def closed(self, link: str) -> None:
        """The leader let this incarnation go."""
        if self._lives(link):
            self.serving = False
            self._agenda.after(self._random.expovariate(1 / self._simulator.scenario.recovery_s), self.start)

    def broken(self, link: str) -> None:
        """The leader broke this incarnation's world."""
        if self._lives(link):
            self.die("aborted", self._random.uniform(0.0, 0.01))

    def _recover(self) -> None:
        self.slowness, self.flapping = 1.0, False

    def _lives(self, link: str) -> bool:
        return self.serving and link == self.link

    def _compute_next(self) -> None:
        if self._computing or self._frozen or not self._queue:
            return
        self._computing = True
        send = self._queue.popleft()
        self._agenda.after(self._work_s(len(send.requests)), lambda: self._finish(send))

    def _work_s(self, rows: int) -> float:
        tail = self._random.lognormvariate(0.0, 0.3) * (8.0 if self._random.random() < 0.005 else 1.0)
        return self._simulator.scenario.work_s * (0.75 + 0.25 * rows) * tail * self.slowness

    def _finish(self, send: SendBatch) -> None:
        if not self._lives(send.link) or self._frozen:
            return
        self._computing = False
        fate = self._simulator.fate_of(send)
        if fate == "kill" or self.flapping:
            self.kill()
        elif fate == "hang":
            self.freeze()
        else:
            self._reply(send, failed=fate == "raise")
            self._compute_next()

    def _reply(self, send: SendBatch, *, failed: bool) -> None:
        event = BatchFailed(send.batch, send.link, "ValueError: no") if failed else BatchDone(send.batch, send.link)
        reply: Callable[[], None] = lambda: self._simulator.deliver(event)  # noqa: E731
        delay_s = self._random.expovariate(1 / _NETWORK_S)
        self._agenda.at(max(self._agenda.now_s, self._held_until_s) + delay_s, reply)
