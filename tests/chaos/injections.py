"""Faults of `multiworld chaos`, made one at a time by a test."""

from chaos.campaign import Injection, inject
from chaos.faults import fault
from chaos.images import photo
from chaos.load import Question
from chaos.observer import Observer, Place
from chaos.scene import WAIT_S, Scene
from deploy.service import LocalService

HEARTBEAT_TIMEOUT_S = 3.0
"""Of the service that is hurt: on a busy machine nobody else is to be taken for frozen."""


def make_fault(service: LocalService, name: str, *places: Place) -> Injection:
    """Hurt the replicas in these places, each a stage and a slot, and wait until every place serves again."""
    with Observer(service.url) as observer:
        now = observer.wait(lambda now: now.complete, WAIT_S, "complete")
        victims = [now.replicas[place] for place in places]
        made = inject(fault(name), Scene(service, observer, victims, HEARTBEAT_TIMEOUT_S, Question(photo())))
    assert not made.surprises, made.surprises
    return made
