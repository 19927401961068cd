"""Keeps all leaders on the same version: operations act on all of them, and a leader that starts later is told the latest version.

Leaders share nothing and store nothing. Each operation that changes the version has a revision, which the leaders report in their state.
The highest revision is the latest version; frontends remember it while a leader restarts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from multiworld_serving.server.administration import OperationInProgressError
from multiworld_serving.server.errors import NotReadyError, RequestRejected
from multiworld_serving.server.frontends.leader_link import LeaderLink, LeaderLostError
from multiworld_serving.server.frontends.messages import Done, LeaderState, Operation
from multiworld_serving.server.predictor import ModelVersion

logger = logging.getLogger(__name__)

_UPDATE_DELAY_S = 2.0
"""How long a leader may serve an earlier version than others before it is updated: an operation may be on its way to it."""
_FAILED_PAUSE_S = 5.0
_BUSY_PAUSE_S = 0.5
_BUSY_S = 60.0
"""How long an operation waits for a leader that loads a version already."""
_RETRY_AFTER_S = 1.0


class VersionAgreement:
    """The version of all leaders.

    Args:
        links: of all leaders; may grow.
        on_change: called when a leader has been updated.

    Attributes:
        version: the latest version.
    """

    def __init__(self, links: Sequence[LeaderLink], on_change: Callable[[], None]) -> None:
        self.version = ModelVersion(0, "")
        self._links = links
        self._on_change = on_change
        self._revision = 0
        self._weights: str | None = None
        """With which the latest version was loaded; None = the configured weights."""
        self._unloaded = False
        self._operating = False
        self._updates: dict[LeaderLink, asyncio.Task[None]] = {}

    def observe(self) -> None:
        """Learn the latest version after the state of a leader has changed, and update leaders that serve an earlier one."""
        states = [link.state for link in self._links if link.state is not None]
        latest = max(states, key=_rank, default=None)
        if latest is not None and (
            latest.revision > self._revision or _rank(latest) >= (self._revision, self.version.name)
        ):
            self._adopt(latest)
        for link in self._links:
            if self.is_outdated(link) and link not in self._updates:
                self._updates[link] = asyncio.create_task(self._update(link))

    def is_outdated(self, link: LeaderLink) -> bool:
        """Whether a leader serves an earlier version than the latest one, or serves although the model is unloaded."""
        state = link.state
        if state is None or state.revision > self._revision or not self._revision:
            return False
        return state.version.name != self.version.name or state.snapshot.unloaded != self._unloaded

    async def load(self, weights: str | None) -> ModelVersion:
        """Load a version on every leader, one after another. If one fails, the others go back to the version before.

        Raises:
            InvalidWeightsError, OperationInProgressError, VersionFailedError: all leaders serve the version before, as far as they live.
            NotReadyError: no leader is connected, or one was lost meanwhile.
        """
        done: list[tuple[LeaderLink, str | None]] = []
        version, revision, self._operating = self.version, self._revision + 1, True
        try:
            for link in self.connected():
                assert link.state is not None
                before = link.state.weights
                try:
                    version = await self._load_when_free(link, weights, revision, wait=bool(done))
                except BaseException as error:
                    for changed, former in done:
                        await self._revert(changed, former, revision + 1)
                    if isinstance(error, LeaderLostError):
                        raise self.lost_during("load-version", link, error) from error
                    raise
                done.append((link, before))
        finally:
            self._operating = False
        return version

    async def unload(self) -> None:
        """Unload the model on every leader. Raises NotReadyError if one was lost meanwhile, and OperationInProgressError."""
        revision, self._operating = self._revision + 1, True
        try:
            for link in self.connected():
                try:
                    await _run(link, Operation("unload", revision=revision))
                except LeaderLostError as error:
                    raise self.lost_during("unload", link, error) from error
        finally:
            self._operating = False

    def connected(self) -> list[LeaderLink]:
        """The links of all leaders that can be reached. Raises NotReadyError if there are none."""
        connected = [link for link in self._links if link.state is not None]
        if not connected:
            raise NotReadyError("no leader is connected; wait until one is", retry_after_s=_RETRY_AFTER_S)
        return connected

    def lost_during(self, operation: str, link: LeaderLink, error: LeaderLostError) -> RequestRejected:
        """The error of an operation whose leader was lost."""
        return NotReadyError(
            f"leader {link.name} was lost during {operation} ({error}); try again", retry_after_s=_RETRY_AFTER_S
        )

    # -- internal --------------------------------------------------------------------------------------------------------------

    def _adopt(self, state: LeaderState) -> None:
        self.version, self._revision = state.version, state.revision
        self._weights, self._unloaded = state.weights, state.snapshot.unloaded

    async def _load_when_free(
        self, link: LeaderLink, weights: str | None, revision: int, *, wait: bool
    ) -> ModelVersion:
        """Load a version on one leader. If `wait`, a leader that loads one already is waited for: a frontend may have updated it."""
        deadline_s = asyncio.get_running_loop().time() + _BUSY_S
        while True:
            try:
                done = await _run(link, Operation("load_version", weights, revision))
                assert done.version is not None, "the leader loaded it"
                return done.version
            except OperationInProgressError:
                if not wait or asyncio.get_running_loop().time() > deadline_s:
                    raise
            await asyncio.sleep(_BUSY_PAUSE_S)
            if link.state is not None and link.state.revision >= revision:
                return link.state.version

    async def _revert(self, link: LeaderLink, weights: str | None, revision: int) -> None:
        try:
            await self._load_when_free(link, weights, revision, wait=True)
        except Exception:
            logger.exception("leader %s keeps the new version: it cannot load the former one again", link.name)

    async def _update(self, link: LeaderLink) -> None:
        """Bring one leader to the latest version. If it fails and no leader has the latest version, continue with that leader's."""
        try:
            if self._has_latest():
                await asyncio.sleep(_UPDATE_DELAY_S)
            state = link.state
            if state is None or not self.is_outdated(link) or self._operating or state.snapshot.version_loading:
                return
            logger.info("leader %s is told to load version %s", link.name, self.version.name)
            if self._unloaded:
                await _run(link, Operation("unload", revision=self._revision))
            else:
                await _run(link, Operation("load_version", self._weights, self._revision))
        except OperationInProgressError:
            await asyncio.sleep(_BUSY_PAUSE_S)  # another frontend has told it first
        except Exception as error:  # noqa: BLE001 - whatever it is, other leaders serve
            if link.state is not None and not self._has_latest():
                logger.warning(
                    "no leader can load %s (%s): continuing with an earlier version", self.version.name, error
                )
                self._adopt(link.state)
            else:
                logger.warning("leader %s does not serve version %s: %s", link.name, self.version.name, error)
                await asyncio.sleep(_FAILED_PAUSE_S)
        finally:
            del self._updates[link]  # if the leader is still outdated, its next STATE starts another update
            self._on_change()

    def _has_latest(self) -> bool:
        return any(link.state is not None and not self.is_outdated(link) for link in self._links)


def _rank(state: LeaderState) -> tuple[int, str]:
    """Orders versions. Two operations on the two sides of a cut network have the same revision: then the name decides."""
    return state.revision, state.version.name


async def _run(link: LeaderLink, operation: Operation) -> Done:
    """Run an operation without steps; returns its result."""
    found = [each async for each in link.operate(operation)]
    assert isinstance(found[-1], Done), "the link raises if it ends before"
    return found[-1]
