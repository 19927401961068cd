"""The parameters of a simulation: load, workers, and faults with their rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from multiworld_serving.server.scheduling.scheduler import SchedulerConfig

Load: TypeAlias = Literal["poisson", "bursts", "closed"]
"""poisson: independent arrivals; bursts: one or forty requests at once; closed: each client waits for its answer before
it sends the next request."""

Tail: TypeAlias = Literal["none", "usual", "heavy"]
"""Distribution of service times. none: constant; usual: log-normal, one in 200 eight times as long; heavy: Pareto with
shape 1.5 (infinite variance), truncated at 100 times the minimum."""

ComputeOutcome: TypeAlias = Literal["answer", "raise", "kill", "hang"]
"""The effect of computing a request, on every worker: a normal answer, an exception, the death of the worker, or a hang."""

Fault: TypeAlias = Literal[
    "kill",
    "freeze",  # computation blocks, heartbeats continue: only the hang timeout detects it
    "stop",  # the whole process stops: missed heartbeats detect it
    "slow",
    "flap",  # dies on every batch for a while, sometimes right after joining
    "raising",  # raises on every batch for a while
    "cut_to",  # partition: nothing reaches the worker; heals before or after the heartbeat timeout
    "cut_from",  # partition: nothing arrives from the worker
    "cut",  # partition in both directions
    "leave",
    "vanish",  # leaves without finishing its batches
    "join",
    "move",  # leaves and rejoins another stage
    "pair",  # two workers of different stages are killed at once
    "double",  # two workers of any stages fail at once, each with a fault of its own
    "blackout",  # all replicas of a stage are killed at once
    "upgrade",  # leaves and rejoins with the next version
    "garbage",  # events for unknown or removed batches and links, or duplicate events
    "storm",  # many requests with very short deadlines
    "mass_cancel",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Parameters of one simulated service. Times in virtual seconds, rates per virtual second."""

    name: str
    config: SchedulerConfig
    replicas: int = 3
    load: Load = "poisson"
    rate: float = 150.0
    """Arrival rate of an open load (poisson, bursts)."""
    clients: int = 24
    """Number of clients of a closed load."""
    timeout_s: tuple[float, float] = (2.0, 20.0)
    work_s: float = 0.01
    """Typical compute time of one row in one stage."""
    row_share: float = 0.25
    """Cost of each further row of a batch, as a fraction of the first."""
    tail: Tail = "usual"
    network_s: float = 0.0005
    """Mean one-way delay of a message, and of the timers of the leader."""
    detection_s: float = 0.0
    """Minimum time from the death of a worker until the leader detects it."""
    recovery_s: float = 1.0
    """Mean time from the death of a worker until it serves again."""
    recovery_varies: bool = True
    """True: exponentially distributed. False: constant."""
    faults: Mapping[Fault, float] = field(default_factory=dict)
    """Rate of each fault."""
    cancelled: float = 0.0
    """Fraction of requests that the client cancels."""
    poison: float = 0.0
    """Fraction of requests that kill every worker that computes them."""
    hanging: float = 0.0
    """Fraction of requests on which computation hangs."""
    failing: float = 0.0
    """Fraction of requests on which the stage always raises."""
    flaky: float = 0.0
    """Fraction of batches on which the stage raises once."""
    allowed_refusals: frozenset[str] = frozenset()
    """Reasons for which a healthy request may be refused. If empty, faults hit only workers whose stage keeps a replica."""
