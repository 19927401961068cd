"""One kind of fault, and the decorator that declares it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from multiworld_serving.testing.chaos.faults.context import FaultContext

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
EXIT_CAUSES = frozenset({"exit"})
HANG_CAUSES = frozenset({"hang"})
LEFT_CAUSES = frozenset({"left"})
PARTITION_CAUSES = frozenset({"exit", "hang", "transport", "aborted", "timeout"})
NO_CAUSES: frozenset[str] = frozenset()
CONNECTION_LOST = frozenset({0})
"""Status of requests whose frontend was lost."""

Inject = Callable[[FaultContext], None]
F = TypeVar("F", bound=Inject)


def _always() -> str:
    return ""


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
    causes: frozenset[str] | None
    unavailable_reason: Callable[[], str] = _always
    excused: frozenset[int] = frozenset()


REGISTRY: list[Fault] = []
"""Every declared fault, in the order of declaration."""


def fault(
    name: str, description: str, scope: Scope = "one", *, causes: frozenset[str] | None = NO_CAUSES, **more: Any
) -> Callable[[F], F]:
    """Decorator that declares a fault, with the attributes of `Fault`. Several decorators declare several faults that inject the same."""

    def declare(inject: F) -> F:
        REGISTRY.append(Fault(name, description, scope, inject, causes, **more))
        return inject

    return declare
