"""What a leader serves, and what it is to serve. Operations change it here, and leaders follow each other."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from multiworld_serving.common.service.administration import Desired, OperationInProgressError, VersionFailedError
from multiworld_serving.common.service.predictor import ModelVersion
from multiworld_serving.server.leader.operations import Operations
from multiworld_serving.server.leader.pipeline.requests import Requests
from multiworld_serving.server.leader.replicas.registry import WorkerRegistry
from multiworld_serving.server.leader.versions.model_source import ModelSource
from multiworld_serving.server.leader.versions.version_table import VersionPlan, VersionTable

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
"""Between attempts to load what the other leaders serve."""


class Serving:
    """
    Args:
        loader: loads further versions; None: the version cannot be changed.
        inform: tells the frontends, and waits until they know it.
        on_change: called when an attribute has changed.

    Attributes:
        operations: of this leader.
        desired: what the leaders of the group are to serve, as far as this one knows.
        served: what it serves.
        draining: whether the leader stops, and frontends send it no new requests.
        obstacle: why it cannot serve what is desired; empty if it does, or tries for the first time.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        versions: VersionTable,
        loader: ModelSource | None,
        timeout_s: float,
        requests: Requests,
        inform: Callable[[], Awaitable[None]],
        on_change: Callable[[], None],
    ) -> None:
        self.operations = Operations(registry, versions, loader, timeout_s, self._into_service)
        self.served = self.desired = Desired(0, versions.current.version)
        self.obstacle = ""
        self.draining = False
        self._registry = registry
        self._versions = versions
        self._requests = requests
        self._inform = inform
        self._on_change = on_change
        self._following: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Follow nobody any more, and load no more versions."""
        if self._following is not None:
            self._following.cancel()
        self.operations.close()

    async def load_version(self, weights: str | None, revision: int = 0) -> ModelVersion:
        """Switch to another version without failing a request. Puts an unloaded model back into service.

        Args:
            weights: as accepted by the version loader; None: the weights of the settings.
            revision: of this operation, at least.
        Raises:
            OperationInProgressError, models.ModelError, VersionFailedError: nothing has changed.
        Cancelling is safe, see `Operations.load_version`.
        """
        if revision and (self.desired.revision, self.desired.weights, self.desired.unloaded) == (
            revision,
            weights,
            False,
        ):
            # The leader that performed this operation was lost, and this one has followed it.
            while self._following is not None and not self._following.done() and not self.obstacle:
                await asyncio.wait({self._following}, timeout=_FIRST_PAUSE_S)
            if self.served == self.desired:
                return self.served.version
        revision = max(revision, self.desired.revision + 1)
        version = await self.operations.load_version(
            weights, lambda plan: Desired(revision, plan.version, weights, drained=self.desired.drained)
        )
        await self._inform()
        return version

    async def unload(self, revision: int = 0) -> None:
        """Reject new requests, and wait until the open ones are answered. Workers keep their versions.

        Raises:
            OperationInProgressError: another operation is in progress.
        """
        with self.operations.exclusive("unloading the model"):
            revision = max(revision, self.desired.revision + 1)
            self.desired = self.desired._replace(revision=revision, unloaded=True)
            self._take_out_of_service(self.desired)
        await self.wait_idle()

    async def drain(self, host: str, revision: int = 0, *, undo: bool = False) -> None:
        """Have the workers of a host leave, one at a time, and admit none; or admit them again if `undo`.

        Raises:
            OperationInProgressError: another operation is in progress.
            DrainError: no other host has a ready replica of a stage, and nothing has changed; or a worker has not left in time.
        """
        with self.operations.exclusive(f"draining {host}"):
            former = frozenset(self.desired.drained)
            drained = former - {host} if undo else former | {host}
            if not undo:
                self.operations.check_other_hosts(drained)
            follows, revision = self.served == self.desired, max(revision, self.desired.revision + 1)
            self._set_desired(self.desired._replace(revision=revision, drained=tuple(sorted(drained))))
            if follows:
                self.served = self.desired
            logger.info("host=%s %s", host, "may serve again" if undo else "is drained: its workers leave")
            await self._inform()
            if not undo:
                await self.operations.wait_left(host)

    def _set_desired(self, desired: Desired) -> None:
        self.desired, self._registry.goal.drained = desired, frozenset(desired.drained)
        self._registry.reconcile()

    async def wait_idle(self) -> None:
        """Wait until no request is open. Frontends first, because they may still have requests that they meant for this leader."""
        await self._inform()
        await self._requests.wait_idle()

    def follow(self, desired: Desired) -> None:
        """Load and serve the version that another leader serves. Retries until it succeeds; meanwhile `obstacle` is the error.

        The version with the higher revision wins. If the revisions are equal and the contents differ, a leader that has served no
        request yet adopts the other leader's version.
        """
        older = desired.rank < self.desired.rank
        own = desired.rank == self.desired.rank and self._requests.has_begun
        if older or own or desired == self.desired:
            return
        logger.info("another leader serves version %s revision=%d", desired.version.name, desired.revision)
        self._set_desired(desired)
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow())
        self._on_change()

    async def _follow(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while (desired := self.desired) != self.served:
            if desired == self.served._replace(revision=desired.revision, drained=desired.drained):
                self.served = desired
                continue
            if desired.unloaded:
                self._take_out_of_service(desired)
                continue
            try:
                self._versions.agree(desired.version)
                await self.operations.load_version(desired.weights, partial(_check_content, desired), follows=True)
            except OperationInProgressError:
                await asyncio.sleep(_FIRST_PAUSE_S)
            except Exception as error:  # noqa: BLE001 - whatever it is, other leaders serve
                self._set_obstacle(f"cannot serve version {desired.version.name} of the other leaders: {error}")
                logger.warning("this leader %s", self.obstacle)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._set_obstacle("")  # also if the other leaders serve now what this one serves

    def _set_obstacle(self, obstacle: str) -> None:
        self.obstacle = obstacle
        self._registry.set_unable(bool(obstacle))
        self._on_change()

    def _take_out_of_service(self, desired: Desired) -> None:
        self.served = desired
        logger.warning("the model is unloaded: requests are refused until it is loaded")
        self._on_change()

    def _into_service(self, desired: Desired) -> None:
        """The version of `desired` serves from now on."""
        if self.served.unloaded:
            logger.info("the model is in service again")
        self.served = desired
        self.desired = max(self.desired, desired, key=lambda each: each.rank)
        self._set_obstacle("")


def _check_content(desired: Desired, plan: VersionPlan) -> Desired:
    """Raises VersionFailedError if a version that was read is not what the other leaders serve."""
    if plan.version.digest != desired.version.digest:
        raise VersionFailedError(
            f"what this leader reads as version {plan.version.name} has the digest {plan.version.digest}, not {desired.version.digest}; "
            "give all leaders the same file, or load a version with `multiworld load-version`"
        )
    return desired
