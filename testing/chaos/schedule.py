"""Selects faults, their order and their targets. Pure: the same seed gives the same schedule."""

import itertools
import random
from collections.abc import Iterator, Sequence

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.testing.chaos.faults import FAULTS
from multiworld_serving.testing.chaos.faults.fault import NEEDS, Fault, Scope
from multiworld_serving.testing.chaos.observer import Replica, Snapshot


def chosen_faults(names: str | None) -> list[Fault]:
    """Return the faults of a list such as "kill,freeze" (all if None), in the order of their declaration. Raises UserError."""
    if names is None:
        return list(FAULTS.values())
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in FAULTS]:
        raise UserError(f"--faults {','.join(unknown)}: there is no such fault; expected {', '.join(FAULTS)}")
    if not wanted:
        raise UserError("--faults: expected at least one fault")
    return [fault for name, fault in FAULTS.items() if name in wanted]


def order(faults: Sequence[Fault], generator: random.Random) -> Iterator[Fault]:
    """Yield faults for ever, in rounds that contain each fault once in random order."""
    while True:
        yield from generator.sample(faults, len(faults))


def missing_targets_reason(fault: Fault, now: Snapshot) -> str:
    """Return why the pipeline has no targets for the fault; empty if it has."""
    return f"needs {NEEDS[fault.scope]}" if fault.scope in NEEDS and not groups(fault.scope, now) else ""


def groups(scope: Scope, now: Snapshot) -> list[tuple[Replica, ...]]:
    """Return all possible target sets of a fault of this scope."""
    stages: dict[int, list[Replica]] = {}
    for replica in now.replicas.values():
        stages.setdefault(replica.stage, []).append(replica)
    shared = [stage for stage in stages.values() if len(stage) > 1]
    if scope == "one":
        return [(replica,) for stage in shared for replica in stage]
    if scope == "two":
        return [pair for one, other in itertools.permutations(shared, 2) for pair in itertools.product(one, other)]
    return [tuple(stage) for stage in stages.values()] if scope == "stage" else [tuple(now.replicas.values())]


def choose_targets(fault: Fault, now: Snapshot, generator: random.Random) -> tuple[Replica, ...]:
    """Return the targets of this fault; empty for a scope without workers. Requires an empty `missing_targets_reason`."""
    return generator.choice(groups(fault.scope, now)) if fault.scope in NEEDS else ()
