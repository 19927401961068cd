"""A discrete-event simulation around the real scheduler: the same seed gives the same run, event for event."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Literal

from server.scheduler import (
    Answer,
    BatchDone,
    BatchFailed,
    BreakLink,
    CloseLink,
    Drain,
    Event,
    LinkBroken,
    LinkDraining,
    Refuse,
    RequestArrived,
    RequestCancelled,
    Scheduler,
    SendBatch,
    Tick,
)
from tests.simulation.agenda import Agenda
from tests.simulation.checker import Checker
from tests.simulation.scenarios import Fault, Scenario
from tests.simulation.workers import Worker

Fate = Literal["answer", "raise", "kill", "hang"]

_SETTLING_S = 300.0


class Simulator:
    """Plays the shell, the workers and the clients of one scenario."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.random = Random(f"{scenario.name}/{seed}")
        self.agenda = Agenda()
        self.scheduler = Scheduler(scenario.config)
        self.checker = Checker(self.scheduler)
        self.events = 0
        self.fates: dict[int, Fate] = {}
        """What happens to who computes this request; those without an entry are healthy."""
        self.workers_by_link: dict[str, Worker] = {}
        self.workers = [
            Worker(self, f"s{stage}r{replica}", stage)
            for stage in range(scenario.config.num_stages)
            for replica in range(scenario.replicas)
        ]
        self.faults = 0
        self._requests = 0
        self._open: set[int] = set()
        self._wakeup_s: float | None = None
        self._ending = False

    def run(self, max_events: int) -> None:
        """Run for so many events, then let things settle and check that nothing is left behind."""
        self._arrive()  # before anybody can serve
        for worker in self.workers:
            self.agenda.after(self.random.uniform(0.0, 0.1), worker.start)
        self.agenda.after(0.2, self._start_load)
        for fault, rate in self.scenario.faults.items():
            self._plan_fault(fault, rate)
        while self.events < max_events:
            self.agenda.step()
        self._settle()

    def deliver(self, event: Event) -> None:
        """Give the scheduler an event, check what it makes of it and carry that out."""
        now_s = self.agenda.now_s
        actions = self.scheduler.handle(event, now_s)
        self.events += 1
        self.checker.check(event, actions, now_s)
        for action in actions:
            match action:
                case SendBatch():
                    delay_s = self.random.expovariate(2000.0)
                    self.agenda.after(delay_s, partial(self.workers_by_link[action.link].receive, action))
                case Answer():
                    for request, _ in action.rows:
                        self._finished(request)
                case Refuse():
                    self._finished(action.request)
                case BreakLink():
                    self.workers_by_link[action.link].broken(action.link)
                case CloseLink():
                    self.workers_by_link[action.link].closed(action.link)
        self._plan_tick()

    def fate_of(self, send: SendBatch) -> Fate:
        """What computing this batch leads to."""
        fates = [self.fates[request] for request in send.requests if request in self.fates]
        if fates:
            return fates[0]
        return "raise" if self.random.random() < self.scenario.flaky else "answer"

    # Time.

    def _plan_tick(self) -> None:
        """The shell's timer fires a little late."""
        wakeup_s = self.scheduler.next_wakeup_s()
        if wakeup_s is None or (self._wakeup_s is not None and self._wakeup_s <= wakeup_s):
            return
        self._wakeup_s = wakeup_s
        self.agenda.at(wakeup_s + self.random.expovariate(2000.0), partial(self._tick, wakeup_s))

    def _tick(self, wakeup_s: float) -> None:
        if self._wakeup_s == wakeup_s:
            self._wakeup_s = None
            self.deliver(Tick())

    def _settle(self) -> None:
        """No more arrivals or faults; everybody recovers; all must be closed in the end."""
        self._ending = True
        end_s = self.agenda.now_s + _SETTLING_S
        while self.scheduler.open_requests:
            assert self.agenda.step(), "nothing more will happen and requests are open"
            assert self.agenda.now_s < end_s, "requests stay open for ever"
        self.deliver(Drain())
        self._arrive()
        assert self.checker.outcomes[self._requests] == "draining"
        self.checker.check_finished()

    # Clients.

    def _start_load(self) -> None:
        if self.scenario.load == "closed":
            for _ in range(self.scenario.clients):
                self.agenda.after(self.random.uniform(0.0, 0.1), self._arrive)
        else:
            self._next_arrival()

    def _next_arrival(self) -> None:
        if self._ending:
            return
        for _ in range(self.random.choice([1, 1, 1, 40]) if self.scenario.load == "bursts" else 1):
            self._arrive()
        rate = self.scenario.rate / (10.0 if self.scenario.load == "bursts" else 1.0)
        self.agenda.after(self.random.expovariate(rate), self._next_arrival)

    def _arrive(self, timeout_s: float | None = None) -> None:
        self._requests += 1
        request = self._requests
        self._open.add(request)
        scenario, draw = self.scenario, self.random.random()
        for fate, share in (("kill", scenario.poison), ("hang", scenario.hanging), ("raise", scenario.failing)):
            if 0 <= draw < share:
                self.fates[request] = fate  # type: ignore[assignment]
            draw -= share
        timeout_s = timeout_s or self.random.uniform(*scenario.timeout_s)
        if self.random.random() < scenario.cancelled:
            self.agenda.after(self.random.expovariate(10.0), lambda: self.deliver(RequestCancelled(request)))
        self.deliver(RequestArrived(request, self.agenda.now_s + timeout_s))

    def _finished(self, request: int) -> None:
        self._open.discard(request)
        if self.scenario.load == "closed" and not self._ending and self.agenda.now_s > 0:
            self.agenda.after(self.random.expovariate(100.0), self._arrive_if_running)

    def _arrive_if_running(self) -> None:
        if not self._ending:
            self._arrive()

    # Faults.

    def _plan_fault(self, fault: Fault, rate: float) -> None:
        self.agenda.after(self.random.expovariate(rate), partial(self._inject, fault, rate))

    def _inject(self, fault: Fault, rate: float) -> None:
        if self._ending:
            return
        worker = self.random.choice(self.workers)
        match fault:
            case "kill" | "stop" | "leave" if not self._redundant(worker):
                self.faults -= 1
            case "kill":
                worker.kill()
            case "freeze":
                worker.freeze()
            case "stop":
                worker.stop()
            case "slow":
                worker.slow_down()
            case "flap":
                worker.flap()
            case "partition":
                worker.hold_up()
            case "leave":
                worker.leave()
            case "vanish":
                worker.die("left", 0.0)
            case "join":
                self._add_worker()
            case "move":
                worker.leave()
                worker.stage = self.random.randrange(self.scenario.config.num_stages)
            case "blackout":
                for each in [each for each in self.workers if each.stage == worker.stage]:
                    each.kill()
            case "upgrade":
                self._upgrade(worker)
            case "garbage":
                self.deliver(self._garbage())
            case "storm":
                for _ in range(30):
                    self._arrive(timeout_s=self.random.uniform(0.0005, 0.05))
            case "mass_cancel":
                for request in sorted(self._open)[::2]:
                    self.deliver(RequestCancelled(request))
        self.faults += 1
        self._plan_fault(fault, rate)

    def _upgrade(self, worker: Worker) -> None:
        """One worker after the other goes over to the next version, none while its stage would be left without."""
        newest = max(each.version for each in self.workers)
        if all(each.version == newest for each in self.workers):
            newest += 1
        fleet = [each for each in self.workers if each.serving and not each.leaving]
        stages = range(self.scenario.config.num_stages)
        complete = all(any(each.stage == stage and each.version == newest for each in fleet) for stage in stages)
        peers = [each for each in fleet if each.stage == worker.stage and each.version == worker.version]
        if worker in peers and worker.version < newest and (complete or len(peers) > 1):
            worker.leave()
            worker.version = newest

    def _redundant(self, worker: Worker) -> bool:
        """Where nothing else can go wrong, one of several replicas fails at a time, so that nothing may be lost."""
        if self.scenario.permits:
            return True
        others = [each for each in self.workers if each.stage == worker.stage and each is not worker]
        return all(each.serving and not each.leaving for each in others)

    def _add_worker(self) -> None:
        stage = self.random.randrange(self.scenario.config.num_stages)
        if len(self.workers) < 4 * self.scenario.replicas * self.scenario.config.num_stages:
            worker = Worker(self, f"extra{len(self.workers)}", stage)
            worker.version = max(each.version for each in self.workers)
            self.workers.append(worker)
            worker.start()

    def _garbage(self) -> Event:
        link = self.random.choice([*self.workers_by_link, "never-was"])
        if self.workers_by_link.get(link) and self.workers_by_link[link].link == link:
            return Tick()  # that incarnation may be alive
        batch = self.random.randrange(1, 1000)
        events: list[Event] = [
            BatchDone(batch, link),
            BatchFailed(batch, link, "late"),
            LinkBroken(link, "exit"),
            LinkDraining(link),
            RequestCancelled(self.random.randrange(1, self._requests + 1000)),
        ]
        return self.random.choice(events)
