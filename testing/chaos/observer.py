"""Polls GET /status: which replicas are ready, and which broke and when."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import httpx

from multiworld_serving.common.config.client_options import NO_CREDENTIALS
from multiworld_serving.testing.local_service import metric_sum

_POLL_S = 0.05

ReplicaKey = tuple[int, int]
"""Stage and slot of a replica."""


class NotRecoveredError(Exception):
    """The service did not reach the expected state before the timeout."""


@dataclass(frozen=True, slots=True)
class ObservedReplica:
    """One slot of a stage at one time."""

    stage: int
    slot: int
    state: str
    generation: int
    worker: str | None
    cause: str | None
    """Cause of its last failure."""
    failed_s: float | None
    """Time of its last failure, on the clock of the leader."""
    leader: int | None = None
    """Process id of the leader that says so. Each leader has its own worlds."""
    world: str | None = None
    """Not always that of the slot: a promoted spare keeps its world. Generations of different worlds cannot be compared."""

    @property
    def link(self) -> tuple[str | None, str | None, int]:
        """Identifies the link of its leader with its worker."""
        return self.worker, self.world, self.generation

    @property
    def key(self) -> ReplicaKey:
        return self.stage, self.slot

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def broken_since(self, before: "ObservedReplica") -> bool:
        """Whether the world of `before` has broken."""
        if self.state not in ("ready", "draining"):
            return True
        return self.leader == before.leader and self.link != before.link


@dataclass(frozen=True, slots=True)
class ObservedLeader:
    """One leader at one time.

    Attributes:
        pid: None while it is unreachable.
    """

    address: str
    state: str
    pid: int | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All replicas at one time."""

    at_s: float = field(compare=False)
    replicas: dict[ReplicaKey, ObservedReplica]
    leaders: tuple[ObservedLeader, ...] = ()
    frontends: frozenset[int] = frozenset()
    """Process ids of the frontends."""

    @property
    def ready(self) -> int:
        """Number of ready replicas."""
        return sum(replica.ready for replica in self.replicas.values())

    @property
    def leaders_ready(self) -> bool:
        """The first leader has the workers, and the others could take over."""
        return all(leader.state == ("standby" if number else "ready") for number, leader in enumerate(self.leaders))

    @property
    def complete(self) -> bool:
        """Every slot of every stage is ready, and so are the leaders."""
        return self.leaders_ready and bool(self.replicas) and all(replica.ready for replica in self.replicas.values())


def parse_status(status: dict[str, Any], at_s: float) -> Snapshot:
    """Parse a document of GET /status."""
    found = {}
    leaders = tuple(ObservedLeader(each["address"], each["state"], each["pid"]) for each in status.get("leaders", ()))
    # The stages are those of one of the leaders.
    source = next((each["pid"] for each in status.get("leaders", ()) if each["uptime_s"] == status["uptime_s"]), None)
    for stage in status["stages"]:
        for replica in stage["replicas"]:
            failure = replica["last_failure"] or {}
            found[stage["index"], replica["slot"]] = ObservedReplica(
                stage=stage["index"],
                slot=replica["slot"],
                state=replica["state"],
                generation=replica["generation"],
                worker=replica["worker"],
                cause=failure.get("cause"),
                failed_s=failure.get("at_unix_s"),
                leader=source,
                world=replica["world"],
            )
    frontends = frozenset(each["pid"] for each in status.get("frontends", ()))
    return Snapshot(at_s, found, leaders, frontends)


class Observer:
    """Polls the status in a background thread. Use as `with`.

    Attributes:
        snapshots: every snapshot that differs from the previous one.
    """

    def __init__(self, url: str, credentials: Mapping[str, Any] = NO_CREDENTIALS, *, model: str | None = None) -> None:
        params = {} if model is None else {"model": model}
        self._client = httpx.Client(base_url=url, params=params, timeout=30.0, **credentials)
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-observer", daemon=True)
        self.snapshots: list[Snapshot] = []

    def __enter__(self) -> Self:
        self.snapshots.append(self._poll())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()

    @property
    def now(self) -> Snapshot:
        with self._changed:
            return self.snapshots[-1]

    def wait(self, wanted: Callable[[Snapshot], bool], timeout_s: float, what: str) -> Snapshot:
        """Wait for a snapshot that satisfies `wanted`, and return it. Raises NotRecoveredError with `what` was expected."""
        with self._changed:
            if self._changed.wait_for(lambda: wanted(self.snapshots[-1]), timeout_s):
                return self.snapshots[-1]
            states = ", ".join(f"s{r.stage}.r{r.slot} {r.state}" for r in self.snapshots[-1].replicas.values())
            states += "".join(f", leader {each.address} {each.state}" for each in self.snapshots[-1].leaders)
        raise NotRecoveredError(f"not {what} within {timeout_s:g} s: {states}")

    def metric(self, name: str) -> float:
        """Return the sum of a metric over all its series; 0 if there are none."""
        return metric_sum(self._client.get("/metrics").text, name)

    def _run(self) -> None:
        while not self._stop.wait(_POLL_S):
            with contextlib.suppress(httpx.HTTPError):
                found = self._poll()
                with self._changed:
                    if not found.replicas:  # no leader is connected to the frontend, so nothing is known of them
                        found = replace(found, replicas=self.snapshots[-1].replicas)
                    if found != self.snapshots[-1]:
                        self.snapshots.append(found)
                        self._changed.notify_all()

    def _poll(self) -> Snapshot:
        return parse_status(self._client.get("/status").json(), time.time())
