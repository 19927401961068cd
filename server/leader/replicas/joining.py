"""Which workers may join, and which slot each of them gets."""

import logging
import os
import socket
import time

from multiworld import WorldManager
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.common.wire.join import JoinRequest
from multiworld_serving.server.leader.replicas.breaker import Breaker
from multiworld_serving.server.leader.replicas.placement import Placement, Slot
from multiworld_serving.server.leader.replicas.reconcile import Goal
from multiworld_serving.server.leader.replicas.worker import Worker
from multiworld_serving.server.leader.versions.version_table import VersionTable

logger = logging.getLogger(__name__)

_HEALTHY_BATCHES = 10
_HEALTHY_S = 10.0
"""After this many batches or seconds a worker counts as healthy, and the circuit breaker's count of its failures starts anew."""
_MAX_FAILED_STARTS = 8
"""A worker process that fails so often in a row to load a version, or to compute its self-test, is not admitted for this version again."""
_GIVEN_UP_S = 30.0
"""When such a worker asks again."""
ELSEWHERE_S = 1.0
"""When a worker asks again that no leader takes, or whose host is drained."""
_QUARANTINED_S = 2.0
"""When a quarantined worker asks again at the latest: it may join as soon as a stage or this leader has lost its other workers."""
_WORKERS_RETURN_S = 2.5
"""Workers that have lost their leader join the next one within this time of each other: the longest pause between their attempts is 2 s."""
_MOVE_S = 0.1
"""When a worker asks again that may not move here yet."""


class Joining:
    """
    Attributes:
        manager: hosts the worlds of the workers.
        port: where workers join; final after `listen`.
        closed: whether no worker may join any more.
        unable: whether this leader cannot serve what the other leaders serve. Only workers that no other leader takes may join.
        breaker: counts the failures of each worker.
    """

    def __init__(
        self,
        versions: VersionTable,
        settings: LeaderSettings,
        placement: Placement,
        goal: Goal,
        manager: WorldManager,
        max_batch_size: int,
    ) -> None:
        self.manager = manager
        self.port = settings.join_port
        self.closed = False
        self.unable = False
        self.breaker = Breaker()
        self._versions = versions
        self._settings = settings
        self._placement = placement
        self._goal = goal
        self._max_batch_size = max_batch_size

    def listen(self) -> None:
        """Listen for workers. Raises OSError if the port is not available."""
        settings, sock = self._settings, None
        if settings.join_fd is not None:
            sock = socket.socket(fileno=os.dup(settings.join_fd))
        self.port = self.manager.listen(settings.join_host, settings.join_port, sock)

    def wait_s(self, request: JoinRequest) -> float:
        """Seconds until this worker may ask again; 0 if it may join now."""
        if request.host in self._goal.drained:
            return ELSEWHERE_S
        former = self._placement.live_worker(request.worker)
        if former is None:
            if self.breaker.given_up(request.worker, self._attempt(request)):
                return _GIVEN_UP_S
            if request.serves and not self._may_move(request):
                return _MOVE_S
            if not all(map(self._placement.num_workers, range(self._placement.num_stages))):
                return 0.0  # a stage has no worker: even a failing worker cannot make it worse
            return min(self.breaker.wait_s(request.worker, time.monotonic()), _QUARANTINED_S)
        # Either the loss of the former worker is not detected yet (missed heartbeats will show it), or two workers have this name.
        if time.monotonic() - former.since_s > 3 * self._settings.heartbeat_timeout_s:
            logger.warning(
                "worker=%s is connected as %s and another worker with this name asks to join: use another --name",
                request.worker,
                former.id,
            )
        return self._settings.heartbeat_timeout_s

    def _attempt(self, request: JoinRequest) -> tuple[str, int]:
        """What fails again if nothing changes: the process of this worker, and the version."""
        return request.edge, self._versions.current.version.number

    def _held(self, request: JoinRequest) -> frozenset[int]:
        """The stages of the current version that this worker has in memory."""
        stages = self._versions.current.stages
        return frozenset(plan.spec.index for plan in stages if plan.digest(self._max_batch_size) in request.held)

    def _may_move(self, request: JoinRequest) -> bool:
        """Whether a worker of another leader may join now.

        It must have what this leader serves in memory. Workers move one after another, and first those of stages that have none here. So
        the other leader can serve until this one can. If none of them comes, the others may move too: this leader can reassign them.
        """
        held, workers = self._held(request), list(self._placement.workers())
        if not held or any(worker.state not in ("ready", "draining") for worker in workers):
            return False
        missing = {stage for stage in range(self._placement.num_stages) if not self._placement.num_workers(stage)}
        if not missing or held & missing:
            return True
        return time.monotonic() > max(worker.since_s for worker in workers) + _WORKERS_RETURN_S

    def choose_slot(self, request: JoinRequest) -> Slot:
        """A worker that has had another leader keeps its stage; otherwise it is placed."""
        held, now_s = self._held(request), time.monotonic()
        if held and (now_s < self._goal.settle_until_s or not self._placement.num_workers()):
            self._goal.settle_until_s = now_s + _WORKERS_RETURN_S
        if held and (now_s < self._goal.settle_until_s or request.serves):
            return self._placement.slot_holding(held)
        destined = self._goal.destined.pop(request.worker, None)
        return self._placement.free_slot(self._placement.choose_stage(request.places, held, destined))

    def failed(self, worker: Worker) -> None:
        """Count a failure of a worker, which may quarantine it."""
        now_s = time.monotonic()
        served_s = now_s - worker.ready_at_s if worker.ready_at_s is not None else 0.0
        healthy = worker.batches_done >= _HEALTHY_BATCHES or served_s >= _HEALTHY_S
        ending, failures = worker.ending, self.breaker.failures(worker.name) + 1
        unable = ending is not None and ending.cause == "error" and "memory" not in ending.detail.lower()
        if ending is not None and unable and worker.ready_at_s is None and failures >= _MAX_FAILED_STARTS:
            logger.error(
                "worker=%s is not admitted again: it has failed %d times in a row. Restart it, or serve another model. %s",
                *(worker.name, failures, ending.detail),
            )
            self.breaker.give_up(worker.name, self._attempt(worker.request))
            return
        if quarantine_s := self.breaker.failed(worker.name, healthy=healthy, now_s=now_s):
            failures = self.breaker.failures(worker.name)
            logger.warning(
                "worker=%s failed %d times in a row: quarantined for %.1f s", worker.name, failures, quarantine_s
            )
