"""What a simulation is made of: the load, the workers, and the misfortunes with their rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from server.scheduler import SchedulerConfig

Load: TypeAlias = Literal["poisson", "bursts", "closed"]
"""poisson: independent arrivals; bursts: now one, now forty at once; closed: every client waits for its answer before
it asks again."""

Tail: TypeAlias = Literal["none", "usual", "heavy"]
"""How service times scatter. none: all alike; usual: log-normal, one in 200 eight times as long; heavy: Pareto with
shape 1.5 (no variance), cut off at 100 times the least."""

Fate: TypeAlias = Literal["answer", "raise", "kill", "hang"]
"""What computing a request leads to, wherever it is computed."""

Fault: TypeAlias = Literal[
    "kill",
    "freeze",  # computing never returns, heartbeats go on: only the hang timeout finds it
    "stop",  # the whole process stands still: heartbeats find it
    "slow",
    "flap",  # dies on every batch for a while, now and then as soon as it has joined
    "sour",  # raises on every batch for a while
    "cut_to",  # partition: nothing reaches the worker; it heals, before the heartbeats' timeout or after
    "cut_from",  # partition: nothing comes from the worker
    "cut",  # partition: both ways
    "leave",
    "vanish",  # leaves without finishing what it had
    "join",
    "move",  # leaves, and comes back for another stage
    "pair",  # two workers of different stages are killed at once
    "double",  # two workers, of whatever stage, are hit at once, each in a way of its own
    "blackout",  # all replicas of a stage at once
    "upgrade",  # comes back with the next version
    "garbage",  # events about things that are not, or no longer, there; or a second time
    "storm",  # many requests with hardly any time
    "mass_cancel",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Times in virtual seconds, rates per virtual second."""

    name: str
    config: SchedulerConfig
    replicas: int = 3
    load: Load = "poisson"
    rate: float = 150.0
    """Arrivals of an open load."""
    clients: int = 24
    """Of a closed load."""
    timeout_s: tuple[float, float] = (2.0, 20.0)
    work_s: float = 0.01
    """Typical time of one row in one stage."""
    row_share: float = 0.25
    """What every further row of a batch costs, as a share of the first."""
    tail: Tail = "usual"
    network_s: float = 0.0005
    """Mean delay of a message, one way, and of the leader's timers."""
    detection_s: float = 0.0
    """From a worker's death until the leader knows at the earliest."""
    recovery_s: float = 1.0
    """From a worker's death until it serves again, on the mean."""
    recovery_varies: bool = True
    """Exponential, or always the same."""
    faults: Mapping[Fault, float] = field(default_factory=dict)
    """Rate of each."""
    cancelled: float = 0.0
    """Share of requests whose client goes away."""
    poison: float = 0.0
    """Share of requests that kill the worker, every time."""
    hanging: float = 0.0
    """Share of requests on which computing never returns."""
    failing: float = 0.0
    """Share of requests on which the stage raises, every time."""
    flaky: float = 0.0
    """Share of batches on which the stage raises, this time."""
    permits: frozenset[str] = frozenset()
    """Reasons for which a healthy request may be refused. Where there are none, faults strike only such workers as can
    be spared."""
