"""The parameters of a simulated service (load, workers, faults with their rates), and the scenarios of tests and soak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from multiworld_serving.server.leader.scheduling.config import SchedulerConfig

Load: TypeAlias = Literal["poisson", "bursts", "closed"]
"""poisson: independent arrivals; bursts: one or forty requests at once; closed: each client waits for its answer before
it sends the next request."""

ComputeOutcome: TypeAlias = Literal["answer", "raise", "kill", "hang"]
"""The effect of computing a request, on every worker: a normal answer, an exception, the death of the worker, or a hang."""

CLIENTS = 24
"""Number of clients of a closed load."""
WORK_S = 0.01
"""Typical compute time of one row in one stage."""
ROW_SHARE = 0.25
"""Cost of each further row of a batch, as a fraction of the first."""
NETWORK_S = 0.0005
"""Mean one-way delay of a message, and of the timers of the leader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Parameters of one simulated service. Times in virtual seconds, rates per virtual second."""

    name: str
    config: SchedulerConfig
    replicas: int = 3
    load: Load = "poisson"
    rate: float = 150.0
    """Arrival rate of an open load (poisson, bursts)."""
    timeout_s: tuple[float, float] = (2.0, 20.0)
    recovery_s: float = 1.0
    """Mean time from the death of a worker until it serves again."""
    recovery_varies: bool = True
    """True: exponentially distributed. False: constant."""
    faults: Mapping[str, float] = field(default_factory=dict)
    """Rate of each fault, see `FAULTS`."""
    keys: int = 1
    """Number of keys of the requests; see `RequestArrived.key`."""
    cancelled: float = 0.0
    """Fraction of requests that the client cancels."""
    outcomes: Mapping[ComputeOutcome, float] = field(default_factory=dict)
    """Fraction of requests with each outcome; the others are answered."""
    flaky: float = 0.0
    """Fraction of batches on which the stage raises once."""
    edges: bool = False
    """Inputs stay at the frontends and outputs at the workers, until they are fetched."""
    max_retained: int = 100
    """Outputs that one worker keeps; further outputs are sent to the leader."""
    allowed_refusals: frozenset[str] = frozenset()
    """Reasons for which a healthy request may be refused. If empty, faults hit only workers whose stage keeps a replica."""


_TWO_STAGES = SchedulerConfig(
    num_stages=2, queue_limit=64, hang_timeout_s=2.0, recovery_grace_s=3.0, hedge_floor_s=0.02
)
_THREE_STAGES = SchedulerConfig(
    num_stages=3, max_batch_size=4, queue_limit=48, hang_timeout_s=1.5, recovery_grace_s=2.0, hedge_floor_s=0.02
)
_GROWING = SchedulerConfig(num_stages=2, max_batch_size=12, slow_batch_size=2, queue_limit=64, hang_timeout_s=2.0)
_ONE_STAGE = SchedulerConfig(
    num_stages=1, max_batch_size=4, window=1, queue_limit=32, hang_timeout_s=1.0, recovery_grace_s=1.0, max_attempts=2
)

FAULTS = {
    "kill": 0.6,
    "freeze": 0.1,  # computation blocks, heartbeats continue: only the hang timeout detects it
    "slow": 0.2,
    "flap": 0.05,  # dies on every batch for a while, sometimes right after joining
    "raising": 0.05,  # raises on every batch for a while
    "cut": 0.2,  # partition in one or both directions; heals before or after the heartbeat timeout
    "leave": 0.3,
    "vanish": 0.1,  # leaves without finishing its batches
    "blackout": 0.03,  # all replicas of a stage are killed at once
    "garbage": 2.0,  # events for unknown or removed batches and links, or duplicate events
    "mass_cancel": 0.1,
    "upgrade": 0.5,  # leaves and rejoins with the next version
    "cut_edges": 1.0,  # one or all edges to other workers and frontends are cut for a while; the link to the leader works
    "kill_after_reply": 0.3,  # dies after the next output that stays at the worker was announced
}
"""All kinds of faults, and their rates in the scenario `everything`."""

_OVERLOAD = frozenset({"overloaded", "deadline"})
_LOSSES = _OVERLOAD | {"no_replica", "poison"}
_ALL_REFUSALS = _LOSSES | {"stage_error"}
_PATIENT: dict[str, Any] = {"load": "closed", "timeout_s": (20.0, 30.0)}
"""Clients that wait longer than any recovery."""
_VERY_PATIENT: dict[str, Any] = {"load": "closed", "timeout_s": (60.0, 90.0), "replicas": 4, "recovery_s": 0.1}

SCENARIOS = (
    Scenario(
        name="keys-without-adaptive-batching",
        config=SchedulerConfig(num_stages=2, batch_timeout_s=0.01, adaptive_batching=False, queue_limit=64),
        rate=400.0,
        keys=20,
        allowed_refusals=frozenset({"overloaded"}),
    ),
    Scenario(
        name="overload-with-short-deadlines",
        config=_THREE_STAGES,
        load="bursts",
        rate=600.0,
        timeout_s=(0.05, 0.5),
        faults={"mass_cancel": 0.5, "slow": 0.3},
        cancelled=0.1,
        allowed_refusals=_OVERLOAD,
    ),
    Scenario(
        name="losses-in-turn", config=_THREE_STAGES, **_PATIENT, recovery_s=0.2, faults={"kill": 2.0, "leave": 3.0}
    ),
    Scenario(name="batches-that-grow", config=_GROWING, **_PATIENT, recovery_s=0.2, faults={"kill": 1.0, "slow": 1.0}),
    Scenario(name="poison-without-other-faults", config=_TWO_STAGES, **_VERY_PATIENT, outcomes={"kill": 0.003}),
    Scenario(
        name="failing-requests",
        config=_TWO_STAGES,
        rate=100.0,
        outcomes={"raise": 0.005},
        flaky=0.01,
        cancelled=0.05,
        timeout_s=(20.0, 30.0),
        allowed_refusals=frozenset({"stage_error"}),
    ),
    Scenario(
        name="one-replica-that-comes-and-goes",
        config=_ONE_STAGE,
        replicas=1,
        rate=40.0,
        recovery_s=0.8,
        faults={"kill": 0.2, "leave": 0.2, "freeze": 0.05},
        outcomes={"kill": 0.002, "raise": 0.01},
        cancelled=0.05,
        allowed_refusals=_ALL_REFUSALS,
    ),
    Scenario(
        name="stage-lost-for-less-than-the-grace",
        config=_TWO_STAGES,
        **_PATIENT,
        recovery_s=1.5,
        recovery_varies=False,
        faults={"blackout": 0.2},
    ),
    Scenario(
        name="stage-lost-for-longer-than-the-grace",
        config=_TWO_STAGES,
        recovery_s=4.0,
        recovery_varies=False,
        faults={"blackout": 0.1},
        allowed_refusals=_LOSSES,
    ),
    Scenario(
        name="rolling-versions",
        config=_THREE_STAGES,
        **_PATIENT,
        recovery_s=0.2,
        faults={"upgrade": 5.0, "garbage": 1.0},
    ),
    Scenario(
        name="edges-cut",
        config=_THREE_STAGES,
        edges=True,
        **_PATIENT,
        faults={"cut_edges": 3.0},
        allowed_refusals=frozenset({"overloaded"}),
    ),
    Scenario(
        name="holders-killed",
        config=_TWO_STAGES,
        edges=True,
        max_retained=3,
        **_PATIENT,
        recovery_s=0.3,
        faults={"kill_after_reply": 3.0, "leave": 0.5},
        # Three killed replicas in a row may have had the same request in flight; this cannot be told from a request that kills them.
        allowed_refusals=frozenset({"overloaded", "poison"}),
    ),
    Scenario(
        name="everything",
        keys=6,
        config=_THREE_STAGES,
        edges=True,
        load="bursts",
        faults=FAULTS,
        cancelled=0.03,
        outcomes={"kill": 0.001, "hang": 0.0005, "raise": 0.002},
        flaky=0.002,
        allowed_refusals=_ALL_REFUSALS,
    ),
)
