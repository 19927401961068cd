"""What is simulated: loads, workers and misfortunes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from server.scheduler import SchedulerConfig

Load = Literal["poisson", "bursts", "closed"]
Fault = Literal[
    "kill",
    "freeze",  # computing never returns, heartbeats go on: only the hang timeout finds it
    "stop",  # the whole process stands still: heartbeats find it
    "slow",
    "flap",  # dies on every batch for a while
    "partition",  # its answers are held up, and come after the heartbeat timeout or before
    "leave",
    "vanish",  # leaves without finishing what it had
    "join",
    "move",  # leaves, and comes back for another stage
    "blackout",  # all replicas of a stage at once
    "upgrade",  # comes back with the next version
    "garbage",  # events about things that are not, or no longer, there
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
    """Typical time of one row in one stage; a further row costs a quarter of it."""
    recovery_s: float = 1.0
    """From a worker's death until it serves again, typically."""
    faults: Mapping[Fault, float] = field(default_factory=lambda: MappingProxyType({}))
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
    """Reasons for which a healthy request may be refused."""


_TWO_STAGES = SchedulerConfig(
    num_stages=2, queue_limit=64, hang_timeout_s=2.0, recovery_grace_s=3.0, hedge_floor_s=0.02
)
_THREE_STAGES = SchedulerConfig(
    num_stages=3, max_batch_size=4, queue_limit=48, hang_timeout_s=1.5, recovery_grace_s=2.0, hedge_floor_s=0.02
)
_ONE_STAGE = SchedulerConfig(
    num_stages=1, max_batch_size=4, window=1, queue_limit=32, hang_timeout_s=1.0, recovery_grace_s=1.0, max_attempts=2
)

_EVERYTHING: dict[Fault, float] = {
    "kill": 0.6,
    "freeze": 0.1,
    "stop": 0.1,
    "slow": 0.2,
    "flap": 0.05,
    "partition": 0.2,
    "leave": 0.3,
    "vanish": 0.1,
    "join": 0.1,
    "blackout": 0.03,
    "garbage": 2.0,
    "storm": 0.2,
    "mass_cancel": 0.1,
}

SCENARIOS = (
    Scenario(name="calm", config=_TWO_STAGES),
    Scenario(
        name="calm-bursts-without-batch-timeout",
        config=SchedulerConfig(num_stages=2, batch_timeout_s=0.0),
        load="bursts",
    ),
    Scenario(name="overload", config=_TWO_STAGES, rate=2000.0, permits=frozenset({"overloaded"})),
    Scenario(
        name="overload-with-short-deadlines",
        config=_THREE_STAGES,
        load="bursts",
        rate=600.0,
        timeout_s=(0.05, 0.5),
        faults={"storm": 1.0, "mass_cancel": 0.5, "slow": 0.3},
        cancelled=0.1,
        permits=frozenset({"overloaded", "deadline"}),
    ),
    Scenario(
        name="kills-in-turn",
        config=_TWO_STAGES,
        load="closed",
        timeout_s=(20.0, 30.0),
        recovery_s=0.3,
        faults={"kill": 2.0},
    ),
    Scenario(
        name="leaving-in-turn",
        config=_THREE_STAGES,
        load="closed",
        timeout_s=(20.0, 30.0),
        recovery_s=0.2,
        faults={"leave": 3.0},
    ),
    Scenario(
        name="slow-and-partitioned",
        config=_THREE_STAGES,
        replicas=4,
        faults={"slow": 0.5, "partition": 0.5, "garbage": 2.0},
        permits=frozenset({"deadline", "overloaded", "poison", "no_replica"}),
    ),
    Scenario(
        name="hangs",
        config=_TWO_STAGES,
        load="closed",
        timeout_s=(5.0, 30.0),
        faults={"freeze": 0.6, "stop": 0.6},
        permits=frozenset({"deadline", "no_replica", "poison"}),
    ),
    Scenario(
        name="poison-without-other-faults",
        config=_TWO_STAGES,
        replicas=4,
        load="closed",
        timeout_s=(60.0, 90.0),
        recovery_s=0.1,
        poison=0.003,
    ),
    Scenario(
        name="failing-requests",
        config=_TWO_STAGES,
        rate=100.0,
        failing=0.005,
        flaky=0.01,
        cancelled=0.05,
        timeout_s=(20.0, 30.0),
        permits=frozenset({"stage_error"}),
    ),
    Scenario(
        name="failing-requests-on-one-replica",
        config=_THREE_STAGES,
        replicas=1,
        rate=50.0,
        failing=0.005,
        timeout_s=(20.0, 30.0),
        permits=frozenset({"overloaded"}),
    ),
    Scenario(
        name="errors-kills-and-abrupt-leaves",
        config=SchedulerConfig(num_stages=2, max_batch_size=2, hang_timeout_s=1.0, recovery_grace_s=2.0),
        replicas=4,
        load="closed",
        clients=16,
        recovery_s=0.1,
        faults={"vanish": 30.0, "kill": 6.0, "leave": 2.0},
        flaky=0.1,
        failing=0.01,
        cancelled=0.3,
        permits=frozenset({"no_replica", "poison", "stage_error", "deadline"}),
    ),
    Scenario(
        name="one-replica-that-comes-and-goes",
        config=_ONE_STAGE,
        replicas=1,
        rate=40.0,
        recovery_s=0.8,
        faults={"kill": 0.2, "leave": 0.2, "freeze": 0.05},
        poison=0.002,
        failing=0.01,
        cancelled=0.05,
        permits=frozenset({"overloaded", "deadline", "no_replica", "poison", "stage_error"}),
    ),
    Scenario(
        name="rolling-versions",
        config=_THREE_STAGES,
        load="closed",
        timeout_s=(20.0, 30.0),
        recovery_s=0.2,
        faults={"upgrade": 5.0, "garbage": 1.0},
    ),
    Scenario(
        name="rolling-versions-with-kills",
        config=_THREE_STAGES,
        recovery_s=0.5,
        faults={"upgrade": 5.0, "kill": 0.5},
        failing=0.002,
        permits=frozenset({"no_replica", "poison", "deadline", "overloaded"}),
    ),
    Scenario(
        name="everything",
        config=_TWO_STAGES,
        load="bursts",
        faults=_EVERYTHING,
        cancelled=0.03,
        poison=0.001,
        hanging=0.0005,
        failing=0.002,
        flaky=0.002,
        permits=frozenset({"overloaded", "deadline", "no_replica", "poison", "stage_error"}),
    ),
    Scenario(
        name="everything-and-versions-and-moves",
        config=_THREE_STAGES,
        load="poisson",
        replicas=2,
        faults={**_EVERYTHING, "upgrade": 0.5, "move": 0.3},
        cancelled=0.03,
        poison=0.001,
        failing=0.002,
        flaky=0.002,
        permits=frozenset({"overloaded", "deadline", "no_replica", "poison", "stage_error"}),
    ),
)
