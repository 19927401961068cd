"""The workers in the status of the service."""

from multiworld_serving.common.service.snapshots import ReplicaSnapshot, StageSnapshot
from multiworld_serving.server.leader.pipeline.driver import SchedulerDriver
from multiworld_serving.server.leader.replicas.placement import Placement, Slot
from multiworld_serving.server.leader.versions.version_table import VersionTable


def stages(versions: VersionTable, placement: Placement, driver: SchedulerDriver) -> tuple[StageSnapshot, ...]:
    """All slots of all stages."""
    return tuple(
        StageSnapshot(
            plan.spec.index,
            plan.spec.blocks,
            tuple(_replica(slot, driver) for slot in placement.of_stage(plan.spec.index)),
            driver.scheduler.counters.reroutes[plan.spec.index],
        )
        for plan in versions.current.stages
    )


def spares(placement: Placement, driver: SchedulerDriver) -> tuple[ReplicaSnapshot, ...]:
    """The workers that have loaded all stages and serve none."""
    return tuple(_replica(slot, driver) for slot in placement.of_stage(None))


def _replica(slot: Slot, driver: SchedulerDriver) -> ReplicaSnapshot:
    worker = slot.worker
    if worker is None:
        return ReplicaSnapshot(slot.id.index, "absent")
    request = worker.request
    return ReplicaSnapshot(
        slot=slot.id.index,
        state="left" if slot.left else worker.state,
        world=worker.id.world,
        generation=worker.generation,
        worker=worker.name,
        host=request.host,
        pid=request.pid,
        device=request.device,
        in_flight=driver.in_flight(worker),
        batches_done=worker.batches_done,
        last_failure=slot.last_failure,
    )
