"""The leaders of a frontend: which one gets a request, and what happens to it when that leader dies.

A frontend keeps each request and its decoded image until it is answered, so it can send it to another leader:

    the leader is lost             the next usable leader at once; after two leaders failed with the same request it is rejected as poison
    overloaded, no replica         one other leader, once, so that overload is not amplified
    draining                       another leader; the same one if there is no other and the request had been admitted
    no leader is usable            wait up to `recovery_grace_s`, then 503

The first answer wins: the world of a lost leader is broken, so a late answer cannot arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from multiworld_serving.server.errors import (
    DeadlineError,
    DrainingError,
    NotReadyError,
    PoisonError,
    RequestRejected,
)
from multiworld_serving.server.frontends.frames import Frame, FrameKind
from multiworld_serving.server.frontends.leader_link import LeaderLink, LeaderLostError
from multiworld_serving.server.frontends.messages import image_payload, parse_prediction, parse_rejection
from multiworld_serving.server.inflight import InflightTracker
from multiworld_serving.server.observability.metrics import Metrics
from multiworld_serving.server.observability.request_traces import current_span
from multiworld_serving.server.predictor import ModelVersion, PipelineSnapshot, Prediction, ServedModel
from multiworld_serving.server.replicas.rolling_restart import RestartStep

logger = logging.getLogger(__name__)

_MAX_LEADER_FAILURES = 2
"""Leaders that may fail with the same request before it is rejected as poison."""
_DEADLINE_GRACE_S = 0.5
"""The leader enforces the deadline with a more precise error; this is the extra time that it gets to report it."""
_RETRY_AFTER_S = 1.0
_UPDATE_DELAY_S = 2.0
_UPDATE_PAUSE_S = 5.0
"""Pause after a leader could not load the latest version."""
_TRY_ELSEWHERE = frozenset({"overloaded", "no_replica", "not_ready"})


@dataclass
class _OpenRequest:
    """A request from its first byte to its response."""

    admitted: bool = False
    """A leader has admitted it: a leader that drains still answers it."""


_open_request: ContextVar[_OpenRequest | None] = ContextVar("open_request", default=None)


class LeaderPool:
    """Implements `multiworld_serving.server.predictor.Pipeline` and `LinkEvents`.

    Args:
        grace_s: how long a request waits while no leader is usable.
        metrics: of this frontend.
        on_change: called when the state of a leader has changed.
        clock: of the deadlines.
    """

    def __init__(
        self,
        grace_s: float,
        metrics: Metrics,
        on_change: Callable[[PipelineSnapshot], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.links: list[LeaderLink] = []
        self.inflight = InflightTracker()
        self.model: asyncio.Future[ServedModel] = asyncio.get_running_loop().create_future()
        self.stopping = False
        self._grace_s = grace_s
        self._metrics = metrics
        self._on_change = on_change
        self._admitted = 0
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._last: PipelineSnapshot | None = None
        self._version = ModelVersion(0, "")
        self._weights: str | None = None
        """With which the latest version was loaded; None = the configured weights."""
        self._revision = 0
        """Of the latest version; each operation that loads a version has a higher one."""
        self._operating = False
        self._was_ready = False
        self._updates: dict[LeaderLink, asyncio.Task[None]] = {}
        self._clock = clock

    # -- Predictor -------------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> ModelVersion:
        """The version that serves new requests: that of the usable leaders, the latest if they differ."""
        return self._version

    async def predict(self, image: Tensor, *, deadline_s: float, request_id: str) -> Prediction:
        """See `Predictor.predict`."""
        fields = {"request_id": request_id, "span": _span()}
        reply, resent = await self._request(FrameKind.PREDICT, fields, deadline_s, image_payload(image))
        prediction = parse_prediction(reply.fields, reply.payload)
        number = self._version.number if prediction.version == self._version.name else prediction.version_number
        return replace(prediction, attempts=prediction.attempts + resent, version_number=number)

    async def check(self, *, deadline_s: float, ahead: int) -> None:
        """See `Predictor.check`."""
        await self._request(FrameKind.CHECK, {"ahead": ahead}, deadline_s)
        request = _open_request.get()
        if request is not None and not request.admitted:
            request.admitted = True
            self._admitted += 1

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """See `Predictor.request`."""
        if self.stopping:
            raise DrainingError("this frontend is stopping and accepts no new requests; use another one")
        if (rejection := self._unloaded()) is not None:
            raise rejection
        request = _OpenRequest()
        token = _open_request.set(request)
        try:
            with self.inflight.track():
                yield
        finally:
            _open_request.reset(token)
            if request.admitted:
                self._admitted -= 1
                self._idle.set()

    # -- Pipeline --------------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """See `Pipeline.ready`."""
        return not self.stopping and any(link.state is not None and link.state.ready for link in self.links)

    def snapshot(self) -> PipelineSnapshot:
        """The pipeline as the first ready leader sees it, with all leaders and frontends."""
        states = [link.state for link in self.links if link.state is not None]
        best = next((state for state in states if state.ready), states[0] if states else None)
        leaders = tuple(link.snapshot() for link in self.links)
        if best is None:
            empty = PipelineSnapshot("", "", False, False, 0.0, 0, 0, ())
            last = self._last or empty
            stages = tuple(
                replace(stage, replicas=tuple(replace(each, state="absent", worker=None) for each in stage.replicas))
                for stage in last.stages
            )
            return replace(
                last,
                ready=False,
                stages=stages,
                spares=(),
                frontends=(),
                leaders=leaders,
                requests_in_flight=self.inflight.count,
            )
        frontends = {frontend.name: frontend for state in states for frontend in state.snapshot.frontends}
        self._last = replace(
            best.snapshot,
            ready=self.ready,
            draining=self.stopping or best.snapshot.draining,
            queue_depth=sum(state.snapshot.queue_depth for state in states),
            requests_in_flight=sum(state.snapshot.requests_in_flight for state in states),
            leaders=leaders,
            frontends=tuple(frontends[name] for name in sorted(frontends)),
        )
        return self._last

    # -- administration: on all leaders ----------------------------------------------------------------------------------------

    async def load_version(self, weights: str | None) -> ModelVersion:
        """Load a version on every leader, one after another. If one fails, the others go back to the version before.

        Raises:
            ModelError, OperationInProgressError, VersionFailedError: all leaders serve the version before, as far as they live.
        """
        done: list[tuple[LeaderLink, str | None]] = []
        version, self._operating = self._version, True
        try:
            for link in self._connected():
                assert link.state is not None
                before = link.state.weights
                try:
                    version = await self._load(link, weights, self._revision + 1)
                except BaseException as error:
                    for changed, former in done:
                        await self._revert(changed, former)
                    if isinstance(error, LeaderLostError):
                        raise self._lost_during("load-version", link, error) from error
                    raise
                done.append((link, before))
        finally:
            self._operating = False
        return version

    async def _load(self, link: LeaderLink, weights: str | None, revision: int) -> ModelVersion:
        version = self._version
        async for result in link.operate("load_version", weights=weights, revision=revision):
            version = ModelVersion(*result["version"])
        return version

    async def _revert(self, link: LeaderLink, weights: str | None) -> None:
        try:
            await self._load(link, weights, self._revision + 2)
        except Exception:
            logger.exception("leader %s keeps the new version: it cannot load the former one again", link.name)

    async def unload(self) -> None:
        """Unload the model on every leader."""
        for link in self._connected():
            try:
                async for _ in link.operate("unload"):
                    pass
            except LeaderLostError as error:
                raise self._lost_during("unload", link, error) from error

    async def restart_workers(self) -> AsyncGenerator[RestartStep, None]:
        """Restart every worker in turn. Workers serve all leaders, so the first connected leader does it; yields each step."""
        link = self._connected()[0]
        try:
            async for step in link.operate("restart_workers"):
                if step:
                    yield RestartStep(**step)
        except LeaderLostError as error:
            raise self._lost_during("rolling-restart", link, error) from error

    def _connected(self) -> list[LeaderLink]:
        connected = [link for link in self.links if link.state is not None]
        if not connected:
            raise NotReadyError("no leader is connected; wait until one is", retry_after_s=_RETRY_AFTER_S)
        return connected

    def _lost_during(self, operation: str, link: LeaderLink, error: LeaderLostError) -> RequestRejected:
        return NotReadyError(
            f"leader {link.name} was lost during {operation} ({error}); try again", retry_after_s=_RETRY_AFTER_S
        )

    # -- LinkEvents ------------------------------------------------------------------------------------------------------------

    def accepts(self, model: ServedModel, leader: LeaderLink) -> str | None:
        """See `LinkEvents`."""
        if not self.model.done():
            self.model.set_result(model)
        served = self.model.result()
        if replace(model, version=served.version) != served:
            return (
                f"the leader at {leader.address} serves {model.name} with {len(model.labels)} classes and {model.crop_size} pixels, but "
                f"this frontend serves {served.name} with {len(served.labels)} and {served.crop_size}; use one frontend for each model"
            )
        return None

    def on_state(self, leader: LeaderLink) -> None:
        """See `LinkEvents`."""
        self._was_ready |= leader.was_ready
        self._update_version()
        self._notify_changed()
        self._metrics.leaders(sum(link.usable for link in self.links), len(self.links))
        if any(link.state is not None for link in self.links):
            self._on_change(self.snapshot())

    def _update_version(self) -> None:
        """Learn the latest version, and have leaders that started later load it: a new leader starts with the configured version."""
        states = [link.state for link in self.links if link.state is not None]
        latest = max(states, key=lambda state: state.revision, default=None)
        if latest is not None and latest.revision >= self._revision:
            self._revision, self._version, self._weights = latest.revision, latest.version, latest.weights
        for link in self.links:
            if self._is_outdated(link) and link not in self._updates:
                self._updates[link] = asyncio.create_task(self._update_leader(link))

    def _is_outdated(self, link: LeaderLink) -> bool:
        """Whether a leader serves an earlier version than the latest one."""
        state = link.state
        return state is not None and state.version.name != self._version.name and state.revision < self._revision

    async def _update_leader(self, link: LeaderLink) -> None:
        """Load the latest version on a leader that serves an earlier one."""
        try:
            if any(each.state is not None and not self._is_outdated(each) for each in self.links):
                await asyncio.sleep(_UPDATE_DELAY_S)  # an operation that loads it everywhere may be on the way
            state = link.state
            if (
                state is not None
                and self._is_outdated(link)
                and not self._operating
                and state.snapshot.version_loading is None
            ):
                logger.info("leader %s is told to load version %s", link.name, self._version.name)
                await self._load(link, self._weights, self._revision)
        except Exception as error:  # noqa: BLE001 - whatever it is, other leaders serve
            logger.warning("leader %s does not serve version %s: %s", link.name, self._version.name, error)
            await asyncio.sleep(_UPDATE_PAUSE_S)
        finally:
            del self._updates[link]
            self._notify_changed()
            if self._is_outdated(link):
                self._updates[link] = asyncio.create_task(self._update_leader(link))

    def _notify_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def scrape(self) -> bytes:
        """See `LinkEvents`."""
        return self._metrics.exposition()[0]

    async def wait_idle(self) -> None:
        """Wait until no admitted request needs a leader that drains: there are none, or another leader is usable."""
        while self._admitted and not any(link.usable for link in self.links):
            self._idle.clear()
            waits = {asyncio.create_task(self._idle.wait()), asyncio.create_task(self._changed.wait())}
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    # -- requests --------------------------------------------------------------------------------------------------------------

    async def _request(
        self, kind: FrameKind, fields: Mapping[str, Any], deadline_s: float, payload: memoryview | bytes = b""
    ) -> tuple[Frame, int]:
        """Send a request to a leader, and to others as the table above says. Returns the reply and how often it was sent again."""
        rejected: dict[LeaderLink, RequestRejected] = {}
        failures = resent = 0
        grace_until_s: float | None = None
        while True:
            link = self._choose(rejected, kind)
            if link is None:
                if rejected:
                    raise next(iter(rejected.values()))
                if (unloaded := self._unloaded()) is not None:
                    raise unloaded
                grace_until_s = grace_until_s or self._clock() + self._grace_s
                await self._wait_for_change(min(grace_until_s, deadline_s), deadline_s)
                continue
            timeout_s = deadline_s - self._clock()
            try:
                sent = {**fields, "timeout_s": timeout_s}
                return await link.request(
                    kind, sent, payload, timeout_s=max(0.0, timeout_s) + _DEADLINE_GRACE_S
                ), resent
            except LeaderLostError as lost:
                failures += lost.failed and kind is FrameKind.PREDICT
                self._check_resubmission(failures, deadline_s, lost)
                resent += 1
                self._metrics.resubmitted("failed" if lost.failed else "left")
            except RequestRejected as rejection:
                if rejection.reason == "draining":  # its STATE frame is on the way, or has arrived
                    await self._wait_for_change(
                        min(self._clock() + _DEADLINE_GRACE_S, deadline_s), deadline_s, strict=False
                    )
                elif rejection.reason not in _TRY_ELSEWHERE or rejected:
                    raise
                else:
                    rejected[link] = rejection
                    if self._choose(rejected, kind) is not None:
                        self._metrics.resubmitted(rejection.reason)
            except TimeoutError as error:
                raise DeadlineError("the leader did not reply before the deadline; try again") from error

    def _check_resubmission(self, failures: int, deadline_s: float, lost: LeaderLostError) -> None:
        """Raise if a request whose leader was lost is not sent again."""
        if failures >= _MAX_LEADER_FAILURES:
            raise PoisonError(
                f"{failures} leaders failed while they had this request; it is not sent to another one"
            ) from lost
        if self._clock() >= deadline_s:
            raise DeadlineError("the leader was lost, and the deadline has passed; try again") from lost

    def _choose(self, rejected: Mapping[LeaderLink, object], kind: FrameKind) -> LeaderLink | None:
        """The leader for a request: of the latest version, ready ones first, with the fewest requests of this frontend."""
        candidates = [link for link in self.links if link.usable and link not in rejected]
        candidates = [link for link in candidates if not self._is_outdated(link)]
        if self._was_ready:  # a leader that has just started would reject it, because its workers have not joined yet
            candidates = [link for link in candidates if link.was_ready]
        if not candidates and kind is FrameKind.PREDICT and not rejected:
            candidates = [link for link in self.links if link.state is not None and link.state.snapshot.draining]

        def order(link: LeaderLink) -> tuple[bool, int]:
            assert link.state is not None
            return (not link.state.ready, link.pending)

        return min(candidates, key=order, default=None)

    async def _wait_for_change(self, until_s: float, deadline_s: float, *, strict: bool = True) -> None:
        """Wait for a change of a leader's state. If `strict`, raise when `until_s` passes first."""
        changed = self._changed
        try:
            async with asyncio.timeout(max(0.0, until_s - self._clock())):
                await changed.wait()
        except TimeoutError:
            if not strict:
                return
            if self._clock() >= deadline_s:
                raise DeadlineError("no leader was reachable before the deadline; try again") from None
            raise NotReadyError(
                f"no leader has been reachable for {self._grace_s:g} s; wait until one has started",
                retry_after_s=_RETRY_AFTER_S,
            ) from None

    def _unloaded(self) -> Exception | None:
        """The rejection of a leader whose model is unloaded, if no leader is usable."""
        states = [link.state for link in self.links if link.state is not None]
        if any(state.rejection is None for state in states):
            return None
        return next((parse_rejection(s.rejection) for s in states if s.rejection and s.snapshot.unloaded), None)


def _span() -> tuple[int, int] | None:
    """Trace id and span id of the current request, the parent of the leader's spans."""
    span = current_span.get()
    if span is None:
        return None
    context = span.get_span_context()
    return (context.trace_id, context.span_id)
