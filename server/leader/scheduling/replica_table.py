"""The replicas of the scheduler, by version and stage."""

from __future__ import annotations

from multiworld_serving.server.leader.scheduling.batches import Attempt, Pool, Replica, VersionPipeline
from multiworld_serving.server.leader.scheduling.config import SchedulerConfig
from multiworld_serving.server.leader.scheduling.events import ReplicaId
from multiworld_serving.server.leader.scheduling.priority_map import PriorityMap


class ReplicaTable:
    """Tracks the replicas. Does not decide about batches.

    The current version is the newest version with a replica for every stage. A version without replicas is removed when another
    version is current.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.replicas: dict[ReplicaId, Replica] = {}
        self.draining: dict[ReplicaId, Replica] = {}
        """Those that get no new batches."""
        self.pipelines: dict[str, VersionPipeline] = {}
        """By version, oldest first."""
        self.current: VersionPipeline | None = None
        self.was_complete = False
        self.hang_deadlines: PriorityMap[Replica, float] = PriorityMap()
        """Replicas with batches in flight, by the time at which they count as hung."""
        self.grace_deadlines: PriorityMap[Pool, float] = PriorityMap()
        """Pools without a replica, by the time at which `recovery_grace_s` ends."""

    @property
    def entry_pool(self) -> Pool | None:
        """The pool to which new batches are sent: stage 0 of the current version."""
        return self.current.pools[0] if self.current else None

    @property
    def unavailable(self) -> bool:
        """No version is complete, and none can still become complete within `recovery_grace_s`."""
        return self.current is None and all(pipeline.expired for pipeline in self.pipelines.values())

    def no_replica_detail(self, stage: int | None = None) -> str:
        """Explains the rejection of requests for a stage (None: any stage) that has lost its replicas."""
        where = "a stage" if stage is None else f"stage {stage}"
        return f"{where} has had no replica for more than {self._config.recovery_grace_s:g} s"

    def add(self, replica_id: ReplicaId, stage: int, version: str, now_s: float) -> None:
        """A replica is ready."""
        pool = self._pipeline(version, now_s).pools[stage]
        replica = Replica(replica_id, pool)
        self.replicas[replica_id] = replica
        pool.pipeline.num_replicas += 1
        pool.accepting[replica_id] = replica
        pool.update_availability(replica)
        pool.expired = False
        self.grace_deadlines.discard(pool)
        self._choose_version()

    def stop_accepting(self, replica: Replica, now_s: float) -> None:
        """Send no new batches to this replica. Batches in flight there continue."""
        pool = replica.pool
        if replica.id not in pool.accepting:
            return
        pool.stop_accepting(replica)
        if not pool.accepting:
            self.grace_deadlines.set(pool, now_s + self._config.recovery_grace_s)
        self._choose_version()

    def remove(self, replica: Replica, now_s: float) -> None:
        """Remove a replica. Its batches in flight will not return."""
        self.stop_accepting(replica, now_s)
        self.hang_deadlines.discard(replica)
        self.draining.pop(replica.id, None)
        del self.replicas[replica.id]
        replica.pool.pipeline.num_replicas -= 1

    def record_sent(self, attempt: Attempt) -> None:
        """Record that a batch was sent, and start the hang timer if it is the only one in flight."""
        attempt.replica.pool.add_attempt(attempt)
        if len(attempt.replica.in_flight) == 1:
            self._start_hang_timer(attempt.replica, attempt.sent_s)

    def record_returned(self, attempt: Attempt, now_s: float) -> float:
        """Record that the replica returned a batch, and restart the hang timer if it was the first of those in flight.

        A worker may compute several batches at the same time: if it returns later ones only, the first one hangs.

        Returns:
            The service time in seconds: since the batch was sent or, if later, since the replica's previous return.
        """
        replica = attempt.replica
        was_first = next(iter(replica.in_flight.values())) is attempt
        replica.pool.remove_attempt(attempt)
        worked_s = now_s - max(attempt.sent_s, replica.answered_s)
        replica.answered_s = now_s
        if not replica.in_flight:
            self.hang_deadlines.discard(replica)
        elif was_first:
            self._start_hang_timer(replica, now_s)
        return worked_s

    def _start_hang_timer(self, replica: Replica, now_s: float) -> None:
        self.hang_deadlines.set(replica, now_s + self._config.hang_timeout_s)

    def drop_unused_versions(self) -> None:
        """Remove the versions without replicas if another one is current. Their queues must be empty."""
        if self.current is None:
            return
        for pipeline in [each for each in self.pipelines.values() if not each.num_replicas]:
            del self.pipelines[pipeline.version]
            for pool in pipeline.pools:
                self.grace_deadlines.discard(pool)

    def _pipeline(self, version: str, now_s: float) -> VersionPipeline:
        pipeline = self.pipelines.get(version)
        if pipeline is None:
            pipeline = self.pipelines[version] = VersionPipeline(version, self._config.num_stages, self._config.window)
            for pool in pipeline.pools:
                self.grace_deadlines.set(pool, now_s + self._config.recovery_grace_s)
        return pipeline

    def _choose_version(self) -> None:
        self.current = next((each for each in reversed(self.pipelines.values()) if each.complete), None)
        self.was_complete = self.was_complete or self.current is not None
