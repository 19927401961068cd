"""Injects one fault of `multiworld chaos` in a test."""

from multiworld_serving.testing.chaos.campaign import inject
from multiworld_serving.testing.chaos.faults import FAULTS
from multiworld_serving.testing.chaos.faults.fault import WAIT_S, FaultContext
from multiworld_serving.testing.chaos.journal import Injection
from multiworld_serving.testing.chaos.observer import Observer, ReplicaKey
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.load.requests import ReferenceRequest
from multiworld_serving.testing.local_service import LocalService

HEARTBEAT_TIMEOUT_S = 3.0
"""Long enough that no other worker counts as frozen on a busy machine."""


def make_fault(service: LocalService, name: str, *slots: ReplicaKey) -> Injection:
    """Inject a fault into these replicas, each given by stage and slot, and wait until every slot is ready again."""
    with Observer(service.url) as observer:
        now = observer.wait(lambda now: now.complete, WAIT_S, "complete")
        targets = [now.replicas[slot] for slot in slots]
        made = inject(
            FAULTS[name], FaultContext(service, observer, targets, HEARTBEAT_TIMEOUT_S, ReferenceRequest(photo()))
        )
    assert not made.unexpected, made.unexpected
    return made
