"""Selects faults, their order and their targets. Pure: the same seed gives the same schedule."""

import itertools
import random
from collections.abc import Iterator, Sequence

from multiworld_serving.common.config import UserError
from multiworld_serving.testing.chaos.faults import PROCESS_FAULTS
from multiworld_serving.testing.chaos.faults.fault import NEEDS, Fault, Scope
from multiworld_serving.testing.chaos.observer import Replica, Snapshot


def chosen_faults(names: str | None, catalogue: Sequence[Fault] = PROCESS_FAULTS) -> list[Fault]:
    """Return the faults of a list such as "kill,freeze" (the default ones if None), in the order of the catalogue. Raises UserError."""
    if names is None:
        return [fault for fault in catalogue if fault.is_default]
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {fault.name: fault for fault in catalogue}
    if unknown := [name for name in wanted if name not in known]:
        raise UserError(f"--faults {','.join(unknown)}: there is no such fault; expected {', '.join(known)}")
    if not wanted:
        raise UserError("--faults: expected at least one fault")
    return [fault for fault in catalogue if fault.name in wanted]


def order(faults: Sequence[Fault], seed: int) -> Iterator[Fault]:
    """Yield faults for ever, in rounds that contain each fault once in random order."""
    generator = random.Random(seed)
    while True:
        yield from generator.sample(faults, len(faults))


def missing_targets_reason(fault: Fault, now: Snapshot, protected: frozenset[str] = frozenset()) -> str:
    """Return why the pipeline has no targets for the fault; empty if it has."""
    if fault.scope not in NEEDS or groups(fault.scope, now, protected):
        return ""
    return f"needs {NEEDS[fault.scope]}" + (", protected workers excluded" if protected else "")


def groups(scope: Scope, now: Snapshot, protected: frozenset[str] = frozenset()) -> list[tuple[Replica, ...]]:
    """Return all possible target sets of a fault of this scope."""
    stages: dict[int, list[Replica]] = {}
    for replica in now.replicas.values():
        stages.setdefault(replica.stage, []).append(replica)
    shared = [stage for stage in stages.values() if len(stage) > 1]
    free = [[replica for replica in stage if replica.worker not in protected] for stage in shared]
    if scope == "one":
        return [(replica,) for stage in free for replica in stage]
    if scope == "two":
        return [pair for one, other in itertools.permutations(free, 2) for pair in itertools.product(one, other)]
    wholes = [tuple(stage) for stage in stages.values()] if scope == "stage" else [tuple(now.replicas.values())]
    return [whole for whole in wholes if all(replica.worker not in protected for replica in whole)]


class FaultTargets:
    """Chooses targets at random among those chosen least often."""

    def __init__(self, seed: int, protected: frozenset[str] = frozenset()) -> None:
        self._generator = random.Random(f"targets {seed}")
        self._protected = protected
        self._times_chosen: dict[tuple[int, int], int] = {}

    def choose(self, fault: Fault, now: Snapshot) -> tuple[Replica, ...]:
        """Return the targets of this fault; empty for a scope without workers. Requires an empty `missing_targets_reason`."""
        if fault.scope not in NEEDS:
            return ()
        choices = groups(fault.scope, now, self._protected)
        fewest = min(self._times(choice) for choice in choices)
        chosen = self._generator.choice([choice for choice in choices if self._times(choice) == fewest])
        for replica in chosen:
            self._times_chosen[replica.key] = self._times_chosen.get(replica.key, 0) + 1
        return chosen

    def _times(self, choice: tuple[Replica, ...]) -> int:
        return sum(self._times_chosen.get(replica.key, 0) for replica in choice)
