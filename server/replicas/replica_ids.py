"""Maps worker links to the scheduler's replicas: one link and one `VersionPlan` are one replica.

The replica id "s0.r0#1@2" is the link "s0.r0#1" for plan number 2. A link that serves two versions, or two cuts of one, is two replicas.
"""

from __future__ import annotations

from collections.abc import Iterator

from multiworld_serving.server.replicas.worker_link import WorkerLink
from multiworld_serving.server.scheduling.events import (
    Event,
    ReplicaBusy,
    ReplicaDraining,
    ReplicaId,
    ReplicaLost,
    ReplicaReady,
)
from multiworld_serving.server.versions.version_table import VersionTable


def replica_id(link: WorkerLink, number: int) -> ReplicaId:
    """The replica of this link for plan `number`."""
    return f"{link.id}@{number}"


def link_id(replica: ReplicaId) -> str:
    """The id of the link that serves this replica."""
    return replica.partition("@")[0]


def plan_number(replica: ReplicaId) -> int:
    """The number of the plan that this replica serves."""
    return int(replica.partition("@")[2])


def replica_ids(link: WorkerLink) -> list[ReplicaId]:
    """The active replicas of this link."""
    return [replica_id(link, number) for number in sorted(link.active_plans)]


def activate(link: WorkerLink, versions: VersionTable) -> Iterator[Event]:
    """Activate every plan in service that the link has loaded. Yields the events for the scheduler."""
    for plan in (versions.current, *([versions.retiring] if versions.retiring else [])):
        if plan.number in link.loaded_plans and plan.number not in link.active_plans:
            link.active_plans.add(plan.number)
            yield ReplicaReady(replica_id(link, plan.number), link.stage, plan.key)


def draining_events(link: WorkerLink) -> list[Event]:
    """The events when the link accepts no new batches."""
    return [ReplicaDraining(replica) for replica in replica_ids(link)]


def busy_events(link: WorkerLink) -> list[Event]:
    """The events when the worker computes for other leaders."""
    return [ReplicaBusy(replica) for replica in replica_ids(link)]


def lost_events(link: WorkerLink) -> list[Event]:
    """The events when the link has ended."""
    return [ReplicaLost(replica, link.cause or "") for replica in replica_ids(link)]
