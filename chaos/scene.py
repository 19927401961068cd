"""What a fault is done with: its victims, the service around them, and the clock."""

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from chaos.containers import ComposeProject, Container, ContainerError
from chaos.load import Question
from chaos.observer import Moment, Observer, Place, Replica
from chaos.processes import Process
from chaos.target import Target

WAIT_S = 180.0
"""Longest wait for what a fault brings about: loading torch on a busy machine takes its time."""


@dataclass(slots=True)
class Scene:
    """One injection while it goes on.

    Attributes:
        victims: the replicas that are hurt, as they were just before.
        heartbeat_timeout_s: silence after which this service takes a worker for hung.
        question: an image to ask about, for faults on the clients' side.
        surprises: what did not go as the fault expects.
        at_s: when the victims were known and the first of them was hurt, on the clock of `time.time()`; 0 before that.
    """

    target: Target
    observer: Observer
    victims: Sequence[Replica]
    heartbeat_timeout_s: float
    question: Question
    surprises: list[str] = field(default_factory=list)
    at_s: float = 0.0

    def hold(self, seconds: float) -> None:
        """Leave things as they are for so long."""
        time.sleep(seconds)

    def begin(self) -> None:
        """From now on somebody is hurt."""
        self.at_s = self.at_s or time.time()

    @property
    def project(self) -> ComposeProject:
        """The project whose containers are hurt. Raises ContainerError when the service runs in none."""
        if not isinstance(self.target, ComposeProject):
            raise ContainerError("the service does not run in containers")
        return self.target

    def container(self, victim: Replica) -> Container:
        """The container in which the worker of this replica runs. Raises ContainerError."""
        return self.project.container(str(victim.worker))

    @contextlib.contextmanager
    def processes(self, victims: Sequence[Replica] | None = None) -> Iterator[list[Process]]:
        """The processes of the victims, or of some of them. Raises ProcessLookupError when one has ended by itself."""
        pids = self.target.worker_pids()
        with ExitStack() as stack:
            found = [stack.enter_context(Process(pids[str(v.worker)])) for v in victims or self.victims]
            self.begin()
            yield found

    def signal(self, signum: signal.Signals, victims: Sequence[Replica] | None = None) -> None:
        """Send a signal to all victims, or to some of them, as nearly at once as can be."""
        with self.processes(victims) as processes:
            for process in processes:
                process.send(signum)

    @contextlib.contextmanager
    def stopped(self, victims: Sequence[Replica] | None = None) -> Iterator[None]:
        """They stand still while the block runs."""
        with self.processes(victims) as processes, ExitStack() as stack:
            for process in processes:
                stack.enter_context(process.stopped())
            yield

    def wait_broken(self, victims: Sequence[Replica] | None = None) -> None:
        """Until the leader has given up the worlds of these replicas, all victims if None. Raises NotRecoveredError."""
        chosen = victims or self.victims
        self.observer.wait(lambda now: all_broken(chosen, now), WAIT_S, "noticed by the leader")

    def wait_complete(self) -> Moment:
        """Until every slot serves. Raises NotRecoveredError."""
        return self.observer.wait(lambda now: now.complete, WAIT_S, "complete again")

    def wait_leader(self) -> None:
        """Until a leader answers that was started after the fault began. Raises NotRecoveredError."""
        self.observer.wait(lambda now: now.leader_since_s > self.at_s, WAIT_S, "led again")

    def wait_rejoining(self, place: Place, epoch: int) -> Replica:
        """The replica in that place once a worker has joined there under a later epoch, whether it serves yet or not."""
        now = self.observer.wait(
            lambda now: now.replicas[place].epoch > epoch and now.replicas[place].worker is not None,
            WAIT_S,
            "joined again",
        )
        return now.replicas[place]


def all_broken(victims: Sequence[Replica], now: Moment) -> bool:
    """Whether none of these serves any more as it did."""
    return all(now.replicas[victim.place].broken_since(victim) for victim in victims)
