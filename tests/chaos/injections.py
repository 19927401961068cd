"""Faults of `multiworld chaos`, injected one at a time by a test."""

from multiworld_serving.testing.chaos.campaign import Injection, inject
from multiworld_serving.testing.chaos.fault_context import WAIT_S, FaultContext
from multiworld_serving.testing.chaos.faults import fault
from multiworld_serving.testing.chaos.observer import Observer, ReplicaKey
from multiworld_serving.testing.load.clients import ReferenceRequest
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService

HEARTBEAT_TIMEOUT_S = 3.0
"""Timeout of the service under test: on a busy machine no healthy process may count as frozen."""


def make_fault(service: LocalService, name: str, *places: ReplicaKey) -> Injection:
    """Inject a fault into these replicas, each given by stage and slot, and wait until every slot is ready again."""
    with Observer(service.url) as observer:
        now = observer.wait(lambda now: now.complete, WAIT_S, "complete")
        victims = [now.replicas[place] for place in places]
        made = inject(
            fault(name), FaultContext(service, observer, victims, HEARTBEAT_TIMEOUT_S, ReferenceRequest(photo()))
        )
    assert not made.unexpected, made.unexpected
    return made
