"""Simulated workers: they compute one batch after the other, and come to grief in every way."""

from __future__ import annotations

from collections import deque
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from server.scheduler import BatchDone, BatchFailed, LinkBroken, LinkDraining, LinkReady, SendBatch

if TYPE_CHECKING:
    from simulation.simulator import Simulator

HEARTBEAT_TIMEOUT_S = 0.5

_PARETO_SHAPE = 1.5
_LONGEST = 100.0


class Worker:
    """A slot that serves one stage, in one incarnation (link) after the other."""

    def __init__(self, simulator: Simulator, name: str, stage: int) -> None:
        self.name = name
        self.stage = stage
        self.num_stages = simulator.scenario.config.num_stages
        self.version = 1
        self.epoch = 0
        self.link = ""
        self.serving = False
        """Alive, in its own eyes."""
        self.leaving = False
        self._slowness = 1.0
        self._flapping = False
        self._sour = False
        self._frozen = False
        self._deaf_until_s = 0.0
        self._mute_until_s = 0.0
        self._queue: deque[SendBatch] = deque()
        self._computing = False
        self._simulator = simulator
        self._scenario = simulator.scenario
        self._agenda = simulator.agenda
        self._random: Random = simulator.chance_of(name)

    def start(self) -> None:
        """Join as a new incarnation."""
        if self.serving:
            return
        self.epoch += 1
        self.link = f"{self.name}#{self.epoch}"
        self.serving, self.leaving, self._frozen, self._computing = True, False, False, False
        self._deaf_until_s = self._mute_until_s = 0.0
        self._queue.clear()
        self._simulator.workers_by_link[self.link] = self
        self._simulator.deliver(LinkReady(self.link, self.stage, f"v{self.version}"))
        if self._flapping and self._random.random() < 0.3:
            self.kill()

    def receive(self, send: SendBatch) -> None:
        """A batch comes in over the incarnation that it names."""
        if not self._lives(send.link):
            return
        if self._agenda.now_s < self._deaf_until_s:
            self._agenda.at(self._deaf_until_s, partial(self.receive, send))
            return
        self._queue.append(send)
        self._compute_next()

    # Misfortunes.

    def die(self, cause: str, detected_after_s: float, down_s: float | None = None) -> None:
        """This incarnation ends; a new one comes some time later, as chance will have it unless `down_s` is given."""
        if not self.serving:
            return
        self.serving = False
        tell = partial(self._simulator.deliver, LinkBroken(self.link, cause))
        self._agenda.after(detected_after_s, tell)
        if self._random.random() < 0.1:
            self._agenda.after(2 * detected_after_s, tell)
        self._recover_later(down_s)

    def kill(self, down_s: float | None = None) -> None:
        noticed_s = self._scenario.detection_s + self._random.uniform(0.0, 10 * self._scenario.network_s)
        self.die("exit", noticed_s, down_s)

    def stop(self) -> None:
        """The process stands still and its heartbeats stop."""
        self.die("hang", HEARTBEAT_TIMEOUT_S)

    def freeze(self) -> None:
        """Computing never returns; the rest of the process lives."""
        self._frozen = True

    def slow_down(self, factor: float, lasts_s: float) -> None:
        self._slowness = factor
        self._agenda.after(lasts_s, self._get_well)

    def flap(self, lasts_s: float) -> None:
        self._flapping = True
        self._agenda.after(lasts_s, self._get_well)

    def turn_sour(self, lasts_s: float) -> None:
        """Raise on every batch."""
        self._sour = True
        self._agenda.after(lasts_s, self._get_well)

    def cut_off(self, lasts_s: float, *, to: bool, from_: bool) -> None:
        """What is sent meanwhile arrives when the partition heals; the heartbeats' timeout may come before that."""
        heals_s = self._agenda.now_s + lasts_s
        self._deaf_until_s = heals_s if to else self._deaf_until_s
        self._mute_until_s = heals_s if from_ else self._mute_until_s
        if lasts_s > HEARTBEAT_TIMEOUT_S:
            self._agenda.after(HEARTBEAT_TIMEOUT_S, partial(self._give_up, self.link))

    def leave(self) -> None:
        """Finish what is there, then go; `CloseLink` says when."""
        if self.serving and not self.leaving:
            self.leaving = True
            self._simulator.deliver(LinkDraining(self.link))

    # What the leader does.

    def closed(self, link: str) -> None:
        """The leader let this incarnation go."""
        if self._lives(link):
            self.serving = False
            self._recover_later()

    def broken(self, link: str) -> None:
        """The leader broke this incarnation's world."""
        if self._lives(link):
            self.die("aborted", self._random.uniform(0.0, 20 * self._scenario.network_s))

    # Inside.

    def _give_up(self, link: str) -> None:
        if self._lives(link):
            self.die("transport", 0.0)

    def _recover_later(self, down_s: float | None = None) -> None:
        mean_s = self._scenario.recovery_s
        if down_s is None:
            down_s = self._random.expovariate(1 / mean_s) if self._scenario.recovery_varies else mean_s
        self._agenda.after(down_s, self.start)

    def _get_well(self) -> None:
        self._slowness, self._flapping, self._sour = 1.0, False, False

    def _lives(self, link: str) -> bool:
        return self.serving and link == self.link

    def _compute_next(self) -> None:
        if self._computing or self._frozen or not self._queue:
            return
        self._computing = True
        send = self._queue.popleft()
        self._agenda.after(self._work_s(len(send.requests)), partial(self._finish, send))

    def _work_s(self, rows: int) -> float:
        work_s = self._scenario.work_s * (1.0 + self._scenario.row_share * (rows - 1)) * self._slowness
        if self._scenario.tail == "usual":
            rare = 8.0 if self._random.random() < 0.005 else 1.0
            work_s *= self._random.lognormvariate(0.0, 0.3) * rare
        elif self._scenario.tail == "heavy":
            work_s *= min(self._random.paretovariate(_PARETO_SHAPE), _LONGEST) / 2
        return work_s

    def _finish(self, send: SendBatch) -> None:
        if not self._lives(send.link) or self._frozen:
            return
        self._computing = False
        fate = self._fate(send)
        if fate == "kill" or self._flapping:
            self.kill()
        elif fate == "hang":
            self.freeze()
        else:
            self._reply(send, failed=fate == "raise" or self._sour)
            self._compute_next()

    def _fate(self, send: SendBatch) -> str:
        fate = self._simulator.fate_of(send)
        flaky = self._scenario.flaky
        return "raise" if fate == "answer" and flaky and self._random.random() < flaky else fate

    def _reply(self, send: SendBatch, *, failed: bool) -> None:
        event = BatchFailed(send.batch, send.link, "ValueError: no") if failed else BatchDone(send.batch, send.link)
        leaves_s = max(self._agenda.now_s, self._mute_until_s)
        self._agenda.at(leaves_s + self._simulator.lag_s(self._random), partial(self._simulator.deliver, event))
