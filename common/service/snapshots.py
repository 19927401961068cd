"""The state of the pipeline at one moment: for the status, the event feed and metrics.

A leader makes a `PipelineSnapshot`. A frontend shows that of the acting leader, with one line for each leader.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from multiworld_serving.common.service.model_versions import Share

ReplicaState = Literal["absent", "joining", "loading", "warming", "checking", "ready", "draining", "left", "broken"]
"""joining: the world forms; loading: the weights are sent; warming: the worker warms up; checking: the join self-test runs;
left: the worker left on purpose; broken: it failed."""

ServiceState = Literal["ready", "degraded", "not_ready", "unloaded", "draining"]
"""degraded: it serves, but the next failure may end that: a stage has lost its spare replica, or a leader is not ready."""
LeaderCondition = Literal["ready", "standby", "not_ready", "draining", "unloaded", "unreachable"]
"""standby: it would serve if workers joined it; they have joined another leader."""
_SHOWN_CHARACTERS = 300
"""Of the error of a worker in the reason why a stage cannot serve."""


@dataclass(frozen=True)
class FailureSnapshot:
    """The last failure of a replica."""

    cause: str
    """`exit`, `hang`, `transport`, `error`, `left`, …"""
    detail: str
    at_unix_s: float


@dataclass(frozen=True)
class ReplicaSnapshot:
    """One slot of a stage, and the worker in it. The slot stays when its worker is replaced."""

    slot: int
    state: ReplicaState
    world: str | None = None
    """Name of the world of its link; None while the slot is absent."""
    generation: int = 0
    """Generation of that world; 0: there was none yet."""
    worker: str | None = None
    """The worker's name."""
    host: str | None = None
    """Name of the worker's machine or container."""
    pid: int | None = None
    """Process id on that host."""
    device: str | None = None
    in_flight: int = 0
    """Batches sent and not returned."""
    batches_done: int = 0
    """Batches returned in this generation."""
    last_failure: FailureSnapshot | None = None


@dataclass(frozen=True)
class StageSnapshot:
    """One stage with its replicas, ordered by slot."""

    index: int
    blocks: tuple[str, ...]
    """Names of the first tensors that cross its boundaries: "input", "layer2_1_relu_1"."""
    replicas: tuple[ReplicaSnapshot, ...]
    rerouted: int = 0
    """Batches moved to another replica after a failure, since the leader started."""

    @property
    def ready_replicas(self) -> int:
        """How many replicas are ready now."""
        return sum(replica.state == "ready" for replica in self.replicas)

    @property
    def has_failed(self) -> bool:
        """Whether no replica is ready, and the last failure of each was an error that it has reported."""
        failures = [replica.last_failure for replica in self.replicas]
        return bool(failures) and not self.ready_replicas and all(each and each.cause == "error" for each in failures)


@dataclass(frozen=True)
class LeaderSnapshot:
    """One leader, as a frontend sees it."""

    address: str
    """HOST:PORT of its join port."""
    state: LeaderCondition
    name: str | None = None
    """None: it was never reached."""
    host: str | None = None
    pid: int | None = None
    version: str | None = None
    queue_depth: int = 0
    requests_in_flight: int = 0
    """Requests of all frontends that it has not answered."""
    uptime_s: float = 0.0
    obstacle: str = ""
    """Why it cannot serve what the other leaders serve."""

    @property
    def available(self) -> bool:
        """Whether it serves, or would if it had workers."""
        return self.state in ("ready", "standby")


@dataclass(frozen=True)
class FrontendSnapshot:
    """One frontend, as a leader sees it."""

    name: str
    host: str
    pid: int


@dataclass(frozen=True)
class RolloutProgress:
    """How far one leader is with loading another version."""

    phase: Literal["reading", "loading", "ending"]
    """reading: the leader reads the weights and splits them; loading: workers load one after another; ending: the new version serves,
    and requests with the former one end."""
    worker: str | None = None
    """The worker that is loading now, or runs the self-test."""
    world: str | None = None
    """The world of its link."""
    passed: tuple[str, ...] = ()
    """The workers that have loaded the version and passed the self-test."""
    workers: int = 0
    """How many workers load it."""


@dataclass(frozen=True)
class PipelineSnapshot:
    """State of the pipeline at one moment."""

    model: str
    version: str
    ready: bool
    draining: bool
    uptime_s: float
    queue_depth: int
    """Accepted requests that wait for a batch."""
    requests_in_flight: int
    """Accepted requests that are not answered."""
    stages: tuple[StageSnapshot, ...]
    spares: tuple[ReplicaSnapshot, ...] = ()
    """Workers that have loaded all stages and serve none. A spare is promoted when a slot becomes free."""
    version_number: int = 1
    version_loading: str | None = None
    """The version that workers are loading."""
    rollout: RolloutProgress | None = None
    unloaded: bool = False
    """An administrator has unloaded the model."""
    drained: tuple[str, ...] = ()
    """Hosts whose workers an administrator has taken out of service."""
    leader: str | None = None
    """The acting leader."""
    leaders: tuple[LeaderSnapshot, ...] = ()
    frontends: tuple[FrontendSnapshot, ...] = ()
    models: dict[str, str] = field(default_factory=dict)
    """The state of every model of this frontend, by name; empty if there is only one."""
    shares: dict[str, Share] = field(default_factory=dict)
    """The shares of the versions of this model, by name; empty if there is only one."""
    failing: tuple[str, ...] = ()
    """Processes that the supervisor of this frontend restarts again and again, and why they end."""
    state: ServiceState = field(init=False, default="not_ready")
    """Follows from the other fields."""
    reasons: tuple[str, ...] = field(init=False, default=())
    """Why the state is not `ready`, as parts of a sentence."""

    def __post_init__(self) -> None:
        state, reasons = _service_state(self)
        object.__setattr__(self, "state", state)
        object.__setattr__(self, "reasons", tuple(reasons))

    @property
    def has_workers(self) -> bool:
        """Whether a worker has joined this leader."""
        replicas = (*self.spares, *(replica for stage in self.stages for replica in stage.replicas))
        return any(replica.state not in ("absent", "left", "broken") for replica in replicas)

    @property
    def missing_stages(self) -> tuple[int, ...]:
        """The stages without a ready replica."""
        return tuple(stage.index for stage in self.stages if not stage.ready_replicas)

    @property
    def failure(self) -> str:
        """Why it will not become ready: all replicas of a stage have reported errors. Empty if it may."""
        return next((_missing(stage) for stage in self.stages if stage.has_failed), "")

    @property
    def redundancy(self) -> int:
        """Number of arbitrary failures that are survived: the fewest ready replicas of any stage, minus one; -1: not serving."""
        return min((stage.ready_replicas for stage in self.stages), default=0) - 1


def _service_state(snapshot: PipelineSnapshot) -> tuple[ServiceState, list[str]]:
    """The state of the service and its reasons. A stage has a spare replica if two are ready; a stage with one slot never had one."""
    if snapshot.draining:
        return "draining", ["the server is stopping"]
    if snapshot.unloaded and not snapshot.ready:  # ready: another leader has loaded it already
        return "unloaded", ["an administrator has unloaded the model"]
    reasons = [*snapshot.failing, *(_missing(stage) for stage in snapshot.stages if not stage.ready_replicas)]
    if not snapshot.ready:
        return "not_ready", reasons or ["the pipeline is not complete"]
    reasons += [
        f"stage {stage.index} has 1 of {len(stage.replicas)} replicas"
        for stage in snapshot.stages
        if stage.ready_replicas == 1 < len(stage.replicas)
    ]
    reasons += [
        f"leader {leader.name or leader.address} {leader.obstacle or 'is ' + leader.state.replace('_', ' ')}"
        for leader in snapshot.leaders
        if not leader.available
    ]
    reasons += [f"host {host} is drained" for host in snapshot.drained if reasons]
    return ("degraded" if reasons else "ready"), reasons


def _missing(stage: StageSnapshot) -> str:
    """Why a stage cannot serve: the states of its replicas, and the first error that a replica has reported."""
    states = ", ".join(replica.state for replica in stage.replicas) or "none"
    failures = [replica.last_failure for replica in stage.replicas if replica.last_failure is not None]
    why = next((f": {failure.detail[:_SHOWN_CHARACTERS]}" for failure in failures if failure.cause == "error"), "")
    return f"stage {stage.index} has no ready replica ({states}){why}"
