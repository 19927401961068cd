"""One kind of fault, the decorator that declares it, and the context of one injection: its targets, the service, waiting for effects."""

import contextlib
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from multiworld_serving.testing.chaos.observer import ObservedReplica, Observer, Snapshot
from multiworld_serving.testing.chaos.system.processes import SystemProcess
from multiworld_serving.testing.load.requests import ReferenceRequest
from multiworld_serving.testing.local_service import RunningService

Scope = Literal["one", "two", "stage", "all", "none", "leader", "frontend"]
"""Targets: one replica, one replica in each of two stages, all replicas of a stage, all workers, none, or another process."""
NEEDS: dict[Scope, str] = {
    "one": "a stage with two replicas",
    "two": "two stages with two replicas each",
    "stage": "a stage",
    "all": "workers",
}
"""What a service must have for a fault of this scope. Scopes that are not listed have no worker targets."""

HOLD_S = 2.0
"""How long a fault lasts after its detection, so that delayed messages arrive late."""
PARTITION_CAUSES = {"exit", "hang", "transport", "aborted", "timeout"}
CONNECTION_LOST = {0}
"""Status of requests whose frontend was lost."""
WAIT_S = 180.0
"""Timeout of each expected effect, including a restart that imports torch on a busy machine."""


@dataclass(slots=True)
class FaultContext:
    """One injection in progress.

    Attributes:
        targets: the affected replicas, as they were just before the injection.
        heartbeat_timeout_s: the heartbeat timeout of the service.
        request: a request for faults on the side of the clients.
        number: how often this fault was injected before.
        unexpected: descriptions of effects that the fault does not expect.
        at_s: time of the injection (`time.time()`); 0 before it.
        victim: name of the affected leader or frontend; empty if there is none.
        lost_s: time when the loss of the affected leader was observed (`time.time()`); None before it.
    """

    system: RunningService
    observer: Observer
    targets: Sequence[ObservedReplica]
    heartbeat_timeout_s: float
    request: ReferenceRequest
    number: int = 0
    unexpected: list[str] = field(default_factory=list)
    at_s: float = 0.0
    victim: str = ""
    lost_s: float | None = None

    def hold(self, seconds: float) -> None:
        """Sleep while the fault lasts."""
        time.sleep(seconds)

    def begin(self) -> None:
        """Record the time of the injection."""
        self.at_s = self.at_s or time.time()

    def processes(
        self, targets: Sequence[ObservedReplica] | None = None
    ) -> contextlib.AbstractContextManager[list[SystemProcess]]:
        """Open the processes of all or some targets. Raises KeyError if one is not known."""
        pids = self.system.worker_pids()
        return self.open(pids[str(target.worker)] for target in targets or self.targets)

    @contextlib.contextmanager
    def open(self, pids: Iterable[int]) -> Iterator[list[SystemProcess]]:
        """Open processes of the service, and record the time of the injection. Raises ProcessLookupError if one has ended."""
        with ExitStack() as stack:
            found = [stack.enter_context(SystemProcess(pid)) for pid in pids]
            self.begin()
            yield found

    @contextlib.contextmanager
    def child(self, kind: str) -> Iterator[SystemProcess]:
        """Open one leader or frontend, in each injection another one. Raises ProcessLookupError if it has ended."""
        pids = sorted(self.system.child_pids(kind).items())
        slot, pid = pids[self.number % len(pids)]
        self.victim = f"{kind}-{slot}"
        with self.open([pid]) as (process,):
            yield process

    def signal(self, signum: signal.Signals, targets: Sequence[ObservedReplica] | None = None) -> None:
        """Send a signal to all or some targets, as close together as possible."""
        with self.processes(targets) as processes:
            for process in processes:
                process.send(signum)

    @contextlib.contextmanager
    def stopped(self, targets: Sequence[ObservedReplica] | None = None) -> Iterator[None]:
        """Stop all or some targets while the block runs."""
        with self.processes(targets) as processes, ExitStack() as stack:
            for process in processes:
                stack.enter_context(process.stopped())
            yield

    def wait_broken(self, targets: Sequence[ObservedReplica] | None = None) -> None:
        """Wait until the leader has detected that the worlds of these replicas (default: all targets) broke. Raises NotRecoveredError."""
        chosen = targets or self.targets
        self.observer.wait(
            lambda now: all(now.replicas[target.key].broken_since(target) for target in chosen),
            WAIT_S,
            "detected by the leader",
        )

    def wait_complete(self) -> Snapshot:
        """Wait until every slot and every leader is ready. Raises NotRecoveredError."""
        return self.observer.wait(lambda now: now.complete, WAIT_S, "complete again")

    def wait_leader_lost(self, pid: int) -> None:
        """Wait until the frontends have lost the leader with this process id. Raises NotRecoveredError."""
        now = self.observer.wait(
            lambda now: all(leader.pid != pid for leader in now.leaders), WAIT_S, "detected by the frontends"
        )
        self.lost_s = now.at_s

    def wait_frontend_replaced(self, pid: int) -> None:
        """Wait until a frontend serves that the supervisor started instead of this one. Raises NotRecoveredError."""
        before = self.observer.now.frontends
        self.observer.wait(
            lambda now: pid not in now.frontends and len(now.frontends) >= len(before),
            WAIT_S,
            "served by a new frontend",
        )

    def wait_rejoining(self, before: ObservedReplica) -> ObservedReplica:
        """Wait until a worker has joined this slot again, ready or not, or a spare has it. Returns the replica."""

        def is_taken(now: Snapshot) -> bool:
            replica = now.replicas[before.key]
            return replica.worker is not None and replica.link != before.link

        return self.observer.wait(is_taken, WAIT_S, "rejoined").replicas[before.key]


Inject = Callable[[FaultContext], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault.

    Attributes:
        description: what is done, for the table of `--list`.
        inject: injects the fault and reverts it where possible.
        causes: allowed causes of broken worlds of the targets; empty if no world may break, None if any outcome is allowed.
        unavailable_reason: returns why the fault is not possible on this machine; empty if it is.
        excused: statuses that requests may get from the injection to the recovery; 0 is a lost connection.
    """

    name: str
    description: str
    scope: Scope
    inject: Inject
    causes: Collection[str] | None = ()
    unavailable_reason: Callable[[], str] = lambda: ""
    excused: Collection[int] = ()


FAULTS: dict[str, Fault] = {}
"""Every declared fault by name, in the order of declaration."""


def fault(name: str, description: str, scope: Scope = "one", **more: Any) -> Callable[[Inject], Inject]:
    """Decorator that declares a fault, with the attributes of `Fault`. Several decorators declare several faults that inject the same."""

    def declare(inject: Inject) -> Inject:
        FAULTS[name] = Fault(name, description, scope, inject, **more)
        return inject

    return declare
