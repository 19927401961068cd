"""Which faults, in which order, to whom. Pure: the same seed gives the same schedule."""

import itertools
import random
import re
from collections.abc import Iterator, Sequence

from chaos.faults import CATALOGUE, Fault, Scope
from chaos.observer import Moment, Replica
from config import UserError

NO_WORKER: tuple[Scope, ...] = ("nobody", "leader")
"""Scopes without victims among the workers."""
_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "": 1.0}


def duration_s(text: str, option: str) -> float:
    """ "90", "90s", "1.5m", "2h" or "500ms" in seconds. Raises UserError, which names the option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|min|m|h|)", text.strip())
    if match is None:
        raise UserError(f"{option} {text}: must be a time such as 90s, 5m or 1h")
    return float(match[1]) * _UNITS_S[match[2]]


def chosen_faults(names: str | None, catalogue: Sequence[Fault] = CATALOGUE) -> list[Fault]:
    """The faults of a list such as "kill,freeze", all if None; in the order of the catalogue. Raises UserError."""
    if names is None:
        return list(catalogue)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {fault.name: fault for fault in catalogue}
    if unknown := [name for name in wanted if name not in known]:
        raise UserError(f"--faults {','.join(unknown)}: there is no such fault; there are {', '.join(known)}")
    if not wanted:
        raise UserError("--faults: names no fault")
    return [fault for fault in catalogue if fault.name in wanted]


def order(faults: Sequence[Fault], seed: int) -> Iterator[Fault]:
    """Round after round without end, each with every fault once, in an order of its own."""
    generator = random.Random(seed)
    while True:
        yield from generator.sample(faults, len(faults))


def lacking(fault: Fault, now: Moment, protected: frozenset[str] = frozenset()) -> str:
    """Why this pipeline has no victims for the fault; empty when it has."""
    if fault.scope in NO_WORKER or groups(fault.scope, now, protected):
        return ""
    needs = {
        "one": "a stage with two replicas, so that one is left",
        "two": "two stages with two replicas each",
        "stage": "a stage",
        "all": "workers",
    }
    return f"needs {needs[fault.scope]}" + (", protected workers excluded" if protected else "")


def groups(scope: Scope, now: Moment, protected: frozenset[str] = frozenset()) -> list[tuple[Replica, ...]]:
    """All choices of victims that a fault of this scope has."""
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


class Victims:
    """Chooses victims at random, but so that in the long run all are hurt equally often."""

    def __init__(self, seed: int, protected: frozenset[str] = frozenset()) -> None:
        self._generator = random.Random(f"victims {seed}")
        self._protected = protected
        self._hurt: dict[tuple[int, int], int] = {}

    def choose(self, fault: Fault, now: Moment) -> tuple[Replica, ...]:
        """Victims for this fault, none for a fault that hurts nobody. `lacking` says beforehand that there are some."""
        if fault.scope in NO_WORKER:
            return ()
        choices = groups(fault.scope, now, self._protected)
        fewest = min(self._times(choice) for choice in choices)
        chosen = self._generator.choice([choice for choice in choices if self._times(choice) == fewest])
        for replica in chosen:
            self._hurt[replica.place] = self._hurt.get(replica.place, 0) + 1
        return chosen

    def _times(self, choice: tuple[Replica, ...]) -> int:
        return sum(self._hurt.get(replica.place, 0) for replica in choice)
