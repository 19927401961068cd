"""The leaders of a frontend: which one gets a request, and what happens to it when that leader dies.

Leaders have an order. The frontend sends requests to the first ready leader, so that one leader forms all batches. It also sends operations
there, and passes what that leader then serves on to the others, which follow. A leader that does not serve it gets no requests.

A frontend keeps each request and its decoded input until it is answered, so it can send it to another leader:

    the leader is lost             the next leader that is ready; after two leaders failed with the same request it is rejected as poison
    its workers have left it       the leader that has them
    overloaded, no replica, …      one other leader, once, so that overload is not amplified
    a tensor cannot be fetched     a leader, which relays all tensors of the request
    the leader drains              another leader; the same one if there is no other and the request had been admitted
    no leader is usable            wait up to `recovery_grace_s`, then 503

Inference has no side effects, so it does no harm that two leaders compute a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple

import msgspec
from torch import Tensor

from multiworld_serving.common.edges.edges import Edges
from multiworld_serving.common.service.errors import DeadlineError, NotReadyError, OverloadedError
from multiworld_serving.common.service.messages import AdminOperation, Done, OperationName, Predict, Step, parse_rows
from multiworld_serving.common.service.predictor import ModelVersion, Prediction, RestartStep, ServedModel
from multiworld_serving.common.service.snapshots import PipelineSnapshot
from multiworld_serving.common.wire.link import LinkLostError
from multiworld_serving.common.wire.protocol import Received, rows_payload
from multiworld_serving.server.frontend.leaders.link import LeaderLink
from multiworld_serving.server.frontend.leaders.order import LeaderOrder
from multiworld_serving.server.frontend.leaders.resending import FAILURES, Relaying, Resending
from multiworld_serving.server.frontend.observability.metrics import FrontendMetrics

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_KEEP_S = 5.0
"""How long the input of a request that ended without an answer is kept if a leader had accepted the request: its batch may be on the way
to a worker, with rows of others."""
_REFUSE_S = 0.02
"""How long requests are refused without being decoded after a leader had no room for one: a leader's queue empties little in this time."""
_SIMILAR = 1.25
"""Further requests are refused whose remaining time is at most this many times that of the request which found no room."""


class _Overload(NamedTuple):
    """The leaders had no room for a request.

    Attributes:
        until_s: requests are refused until then.
        timeout_s: those with at most this much time: one with more time may find room.
    """

    error: OverloadedError
    until_s: float = 0.0
    timeout_s: float = 0.0


class LeaderPool:
    """The leaders, as the HTTP and gRPC APIs use them.

    Args:
        grace_s: how long a request waits while no leader is usable.
        on_change: called when the state of a leader has changed.
        name: of the model that the leaders serve; "" = they decide.

    Attributes:
        leaders: which of them acts.
        metrics: of this frontend.
        edges: of this process.
        open_requests: number of requests that were admitted and have not ended.
    """

    def __init__(
        self,
        grace_s: float,
        metrics: FrontendMetrics,
        on_change: Callable[[PipelineSnapshot], None],
        edges: Edges,
        name: str = "",
    ) -> None:
        self.name = name
        self.leaders = LeaderOrder()
        self.open_requests = 0
        self.model: asyncio.Future[ServedModel] = asyncio.get_running_loop().create_future()
        self.stopping = False
        self._grace_s = grace_s
        self.metrics = metrics
        self._on_change = on_change
        self._last = PipelineSnapshot(name, "", False, False, 0.0, 0, 0, ())
        self._overload = _Overload(OverloadedError(""))
        self._relaying = Relaying()
        self.edges = edges

    # -- requests --------------------------------------------------------------------------------------------------------------

    @property
    def links(self) -> list[LeaderLink]:
        """To all leaders, in their order."""
        return self.leaders.links

    async def admit(self, deadline_s: float) -> None:
        """Wait until a leader can be used. From then on until `end`, a leader that drains still answers the request.

        Raises:
            OverloadedError: the leaders have just had no room for such a request, so its body need not be decoded.
            NotReadyError: there was none for long, or the model is unloaded.
            DeadlineError: there was none before the deadline.
        """
        if not self.leaders.candidates:
            await self._wait_for_leader(deadline_s)
        error, until_s, timeout_s = self._overload
        if (now_s := time.monotonic()) < until_s and deadline_s - now_s <= timeout_s:
            raise OverloadedError(error.detail, retry_after_s=error.retry_after_s)
        self.open_requests += 1

    def end(self) -> None:
        """A request that was admitted has ended."""
        self.open_requests -= 1

    async def predict(
        self,
        rows: Tensor,
        *,
        deadline_s: float,
        request_id: str,
        key: str = "",
        traced: bool = False,
        route: tuple[str, ...] = (),
    ) -> Prediction:
        """Compute the samples of one request with one version.

        Args:
            rows: their inputs [N, …] as `ServedModel.input_rows` describes, contiguous, on the CPU.
            key: requests with equal keys can be computed together; see `RowFormat.key`.
            route: the replicas that keep the session of the request; see `Predict`.
            deadline_s: deadline on the clock of `time.monotonic()`.
            request_id: identifies this request in the log.
            traced: the prediction, or the exception, has a `trace`.
        Raises:
            RequestRejected: a subclass says why (multiworld_serving.common.service.errors). The leaders continue to serve.
        Leaders reject a request at its deadline. If the leader does not reply, the caller cancels soon after the deadline.
        Cancelling withdraws the request: it is not sent again, and a late output is dropped.
        """
        count, row_bytes = rows.shape[0], rows.shape[1] if self.model.result().input_rows.row_shape is None else 0
        store = self.edges.store
        sending = Resending(self.leaders, self._relaying, self.metrics, self.name)
        number = None if sending.relay else store.put(self, rows)
        try:
            while True:
                link = self.leaders.choose(sending.rejected)
                if link is None:
                    if sending.rejected:
                        raise next(iter(sending.rejected.values()))
                    await self._wait_for_leader(deadline_s)
                    continue
                tensor, left_s = None if sending.relay else number, deadline_s - time.monotonic()
                message = Predict(request_id, left_s, key, count, tensor, row_bytes, sending.relay, traced, route)
                payload = rows_payload(rows) if tensor is None else b""
                sending.holders += 1
                try:
                    reply = await link.connected().call(message, payload, timeout_s=None)
                    output = await self._output(reply, count)
                    break
                except FAILURES as error:
                    if not await sending.after(error, link):
                        raise
        except BaseException as error:
            if isinstance(error, OverloadedError) and count == 1:  # a leader may have room for fewer rows
                self._refuse_similar(error, deadline_s - time.monotonic())
            if number is not None and sending.holders:
                store.expire(number, _KEEP_S)
            elif number is not None:
                store.release((number,))
            sending.rejected.clear()  # their tracebacks keep this frame, and the input with it
            raise
        if number is not None:
            store.release((number,))
        answer: Prediction = reply.body
        return msgspec.structs.replace(answer, output=output, kept=(), attempts=answer.attempts + sending.resent)

    def _refuse_similar(self, error: OverloadedError, left_s: float) -> None:
        """Refuse requests for a moment that have about as little time as this one, for which the leaders had no room."""
        refusal = OverloadedError(error.detail, retry_after_s=error.retry_after_s)
        self._overload = _Overload(refusal, time.monotonic() + _REFUSE_S, _SIMILAR * left_s)

    async def _output(self, reply: Received, count: int) -> Tensor:
        """The output, `count` rows: from the reply, and from workers that keep them. Raises RowsLostError."""
        rows, answer = self.model.result().output_rows, reply.body
        if not answer.kept:
            return parse_rows(reply.payload, count, rows)
        kept = [at for source in answer.kept for at in source.at]
        sent_at = [at for at in range(count) if at not in kept]
        if len(kept) + len(sent_at) != count:
            raise ValueError(f"outputs of the samples {kept!s:.100}; expected each of {count} at most once")
        sent = parse_rows(reply.payload, len(sent_at), rows) if sent_at else None
        row_shape = (answer.row_bytes,) if rows.row_shape is None else rows.row_shape
        return await self.edges.fetch_rows(answer.kept, count, rows.dtype, row_shape, (sent, sent_at), take=True)

    async def _wait_for_leader(self, deadline_s: float) -> None:
        """Wait until a leader can be used. Raises NotReadyError after `grace_s` or if the model is unloaded, and DeadlineError."""
        until_s = min(time.monotonic() + self._grace_s, deadline_s)
        while not self.leaders.candidates:
            if self.leaders.desired is not None and self.leaders.desired.unloaded:
                raise NotReadyError("the model is unloaded; an administrator must load it first")
            if not await self.leaders.wait_for_change(until_s):
                if time.monotonic() >= deadline_s:
                    raise DeadlineError("no leader was reachable before the deadline; try again")
                raise NotReadyError(f"no leader has been reachable for {self._grace_s:g} s; wait until one has started")

    # -- the state of the service ----------------------------------------------------------------------------------------------

    @property
    def version(self) -> ModelVersion:
        """The version that serves new requests."""
        return self.leaders.version

    @property
    def ready(self) -> bool:
        """Whether every stage of a leader has a ready replica, the model is loaded, and the leader is not stopping."""
        return any(link.state is not None and link.state.snapshot.ready for link in self.leaders.current)

    def snapshot(self) -> PipelineSnapshot:
        """The pipeline as the acting leader sees it, with all leaders. While no leader is connected, stages have no replicas."""
        leaders = tuple(link.snapshot() for link in self.links)
        if self.leaders.acting is None or self.leaders.acting.state is None:
            stages, last = tuple(replace(stage, replicas=()) for stage in self._last.stages), self._last
            gone = PipelineSnapshot(last.model, last.version, False, self.stopping, last.uptime_s, 0, 0, stages)
            return replace(gone, version_number=last.version_number, leader=last.leader, leaders=leaders)
        found = self.leaders.acting.state.snapshot
        self._last = replace(
            found,
            ready=self.ready,
            draining=self.stopping or found.draining,
            leaders=leaders,
            leader=self.leaders.acting.label,
        )
        return self._last

    # -- administration: by the acting leader ----------------------------------------------------------------------------------

    async def load_version(self, weights: str | None) -> ModelVersion:
        """Load a version. Raises an error of `administration`, or NotReadyError if no leader is connected or the leader is lost."""
        done = [each async for each in self._operate("load-version", weights)][-1]
        assert isinstance(done, Done)
        assert done.version is not None, "the leader loaded it"
        return done.version

    async def unload(self) -> None:
        """Unload the model. Raises OperationInProgressError, or NotReadyError as for `load_version`."""
        async for _ in self._operate("unload"):
            pass

    async def drain(self, host: str, *, undo: bool) -> None:
        """Drain a host, or use it again. Raises an error of `administration`, or NotReadyError as for `load_version`."""
        async for _ in self._operate("undrain" if undo else "drain", host=host):
            pass

    async def restart_workers(self) -> AsyncGenerator[RestartStep, None]:
        """Restart every worker in turn; yields each step."""
        async with aclosing(self._operate("rolling-restart")) as steps:
            async for step in steps:
                if isinstance(step, Step):
                    yield step.step

    async def _operate(
        self, operation: OperationName, weights: str | None = None, host: str = ""
    ) -> AsyncGenerator[Step | Done, None]:
        """Have the acting leader perform an operation. If it is lost, the next one does, unless steps have been reported."""
        revision = 1 + (0 if self.leaders.desired is None else self.leaders.desired.revision)
        error: NotReadyError = NotReadyError("no leader is connected; wait until one is")
        for _ in self.links:
            link = self.leaders.acting or next((link for link in self.links if link.state is not None), None)
            if link is None:
                break
            try:
                async with aclosing(
                    link.connected().stream(AdminOperation(operation, weights, revision, host))
                ) as steps:
                    async for step in steps:
                        yield step
                return
            except LinkLostError as lost:
                error = NotReadyError(f"leader {link.name} was lost during {operation} ({lost}); try again")
                logger.warning("%s", error.detail)
                if operation == "rolling-restart":
                    break
        raise error

    # -- links -----------------------------------------------------------------------------------------------------------------

    def check_model(self, model: ServedModel | None, leader: LeaderLink) -> None:
        """Raises ValueError if this leader cannot be used, because it serves another model."""
        if model is None:
            raise ValueError("the first state of a leader has no model")
        if self.name not in ("", model.name):
            raise ValueError(
                f"the leader at {leader.address} serves {model.name!r}, but this frontend expects {self.name!r} there; start the leader "
                f"with --model {self.name}=SOURCE"
            )
        if not self.model.done():
            self.name = model.name
            self.model.set_result(model)
        served = self.model.result()
        if replace(model, version=served.version) != served:
            raise ValueError(
                f"the leader at {leader.address} serves {model!s:.1000}, but this frontend serves {served!s:.1000}; name the leaders of "
                "each model with --leader NAME=HOST:PORT"
            )

    def on_state(self) -> None:
        """The state of a leader has changed, or it was lost."""
        self.leaders.update()
        if self.ready:  # workers have left leaders that are not ready
            for link in self.links:
                if link.state is not None and not (link.state.snapshot.ready or link.state.snapshot.unloaded):
                    link.connected().withdraw_calls("another leader has the workers")
        snapshot = self.snapshot()
        if self.name:
            usable = sum(link.usable for link in self.leaders.current)
            self.metrics.group_state(self.name, usable, len(self.links), snapshot.state)
        if any(link.state is not None for link in self.links):
            self._on_change(snapshot)

    async def wait_idle(self) -> Done:
        """Return when no admitted request needs a leader that drains: there are none, or another leader is usable."""
        while self.open_requests and not any(link.usable for link in self.leaders.current):  # noqa: ASYNC110 - only while leaders stop
            await asyncio.sleep(_POLL_S)
        return Done()
