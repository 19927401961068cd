"""Leaders for a frontend's pool: links without a network, which answer as a test tells them."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import msgspec
import torch

from multiworld_serving.common.config.addresses import Address
from multiworld_serving.common.edges.edges import Edges
from multiworld_serving.common.service.administration import Desired
from multiworld_serving.common.service.messages import AdminOperation, Done, Follow, LeaderState, Predict, Scrape, Step
from multiworld_serving.common.service.predictor import ImageSizes, ModelVersion, Prediction, ServedModel
from multiworld_serving.common.wire.link import Link, LinkLostError
from multiworld_serving.common.wire.protocol import Kind, Received, rows_payload
from multiworld_serving.server.frontend.leaders.link import LeaderLink
from multiworld_serving.server.frontend.leaders.pool import LeaderPool
from multiworld_serving.server.frontend.observability.metrics import FrontendMetrics
from tests.unit.edges.edge_parts import unused_edges
from tests.unit.server.image_model import image_classifier
from tests.unit.server.pipelines import pipeline

FIRST = Desired(0, ModelVersion(1, "v1", "digest of v1"))
MODEL = image_classifier("m", "v1", ("a", "b"), ImageSizes(18, 16))


def leader_state(name: str, **changes: Any) -> LeaderState:
    """The state of a leader that serves the configured version."""
    snapshot = pipeline(("ready",), version="v1", leader=name)
    return msgspec.structs.replace(LeaderState("here", 1, FIRST, FIRST, snapshot), **changes)


def desired(revision: int, name: str, digest: str = "") -> Desired:
    """That version 1 to 9 with this name serves."""
    return Desired(revision, ModelVersion(int(name[1:]), name, digest or f"digest of {name}"), name)


def prediction(version: str = "v1", number: int = 1) -> Prediction:
    return Prediction(torch.tensor([[0.25, 0.75]]), "m", version, 0.1, 0.2, 0.3, 1, ("w",), 1, number)


class FakeLeader(LeaderLink):
    """Answers each request with the next of its `answers`, and with a prediction when there are none left.

    Attributes:
        answers: of predictions: an exception to raise, or an event to wait for before answering.
        got: the requests, in order.
        told: what the frontend has said that other leaders serve.
        refuses: what the operations raise, by weights.
    """

    def __init__(self, pool: LeaderPool, number: int) -> None:
        none = cast(Any, None)
        super().__init__(Address("10.0.0.1", 8000 + number), none, pool)
        self.name = f"leader-{number}"
        self.pool = pool
        self.answers: list[BaseException | asyncio.Event] = []
        self.got: list[tuple[Predict | Scrape, bytes]] = []
        self.told: list[Desired] = []
        self.operations: list[str] = []
        self.refuses: dict[str | None, Exception] = {}
        self.withdrawn: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def tells(self, *, ready: bool | None = None, **changes: Any) -> None:
        """A state arrives."""
        self.state = msgspec.structs.replace(self.state or leader_state(self.name or ""), **changes)
        if ready is not None:
            self.state = msgspec.structs.replace(self.state, snapshot=replace(self.state.snapshot, ready=ready))
        self.was_ready |= self.state.snapshot.ready
        self.pool.on_state()

    def serves(self, found: Desired) -> None:
        """It decides this, or follows."""
        self.tells(desired=found, served=found)

    def send(self, body: Follow) -> None:
        self.told.append(body.desired)

    def tells_draining(self) -> None:
        assert self.state is not None
        self.tells(snapshot=replace(self.state.snapshot, draining=True, ready=False))

    def tells_unloaded(self) -> None:
        assert self.state is not None
        unloaded = self.state.served._replace(revision=self.state.served.revision + 1, unloaded=True)
        snapshot = replace(self.state.snapshot, unloaded=True, ready=False)
        self.tells(desired=unloaded, served=unloaded, snapshot=snapshot)

    def is_lost(self) -> None:
        self._on_lost()

    def withdraw_calls(self, detail: str) -> None:
        if not self.withdrawn.done():
            self.withdrawn.set_exception(LinkLostError(detail, failed=False))

    def connected(self) -> Link:
        return cast(Link, self)

    async def call(self, body: Predict | Scrape, payload: memoryview | bytes = b"", *, timeout_s: float) -> Received:
        self.got.append((body, bytes(payload)))
        answer = self.answers.pop(0) if self.answers else None
        await asyncio.sleep(0)
        if isinstance(answer, LinkLostError):
            self._on_lost()
        if isinstance(answer, BaseException):
            try:
                raise answer
            finally:
                del answer  # otherwise the exception and this frame keep each other in memory
        if answer is not None:
            answered: asyncio.Future[Any] = asyncio.ensure_future(answer.wait())
            await asyncio.wait({answered, self.withdrawn}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                answered.cancel()
                self.withdrawn.result()
        assert self.state is not None
        found = prediction(self.state.served.version.name, self.state.served.version.number)
        probabilities = memoryview(bytearray(rows_payload(found.output)))
        return Received(Kind.REPLY, 1, found, probabilities)

    async def stream(self, operation: AdminOperation) -> AsyncGenerator[Step | Done, None]:
        self.operations.append(operation.operation)
        await asyncio.sleep(0)
        if operation.operation == "load-version":
            self._refuse(operation.weights)
            found = desired(operation.revision, operation.weights or "v1")
            self.serves(found)
            yield Done(found.version)
        else:
            self._refuse(operation.operation)
            yield Done()

    def _refuse(self, what: str | None) -> None:
        if (error := self.refuses.get(what)) is not None:
            if isinstance(error, LinkLostError):
                self._on_lost()
            raise error

    def sent(self) -> int:
        """How many requests came."""
        return len(self.got)


class Pool:
    """A pool of fake leaders that serve, and its metrics."""

    def __init__(
        self, leaders: int = 0, grace_s: float = 60.0, frontend: Edges | None = None, model: ServedModel = MODEL
    ) -> None:
        self.metrics = FrontendMetrics()
        self.pool = LeaderPool(grace_s, self.metrics, lambda _: None, frontend or unused_edges(), model.name)
        self.leaders = [FakeLeader(self.pool, number) for number in range(leaders)]
        self.pool.links.extend(self.leaders)
        self.pool.model.set_result(model)

    def resubmitted(self, reason: str) -> float:
        name = "multiworld_requests_resubmitted_total"
        return self.metrics.registry.get_sample_value(name, {"model": MODEL.name, "reason": reason}) or 0.0


def pool_of(leaders: int, *, grace_s: float = 60.0, connected: bool = True) -> tuple[Pool, list[FakeLeader]]:
    """A pool of fake leaders, and these leaders."""
    made = Pool(leaders, grace_s)
    if connected:
        for leader in made.leaders:
            leader.tells()
    return made, made.leaders


@asynccontextmanager
async def open_request(pool: LeaderPool) -> AsyncIterator[None]:
    """A request, from its first byte to its response."""
    await pool.admit(time.monotonic() + 30)
    try:
        yield
    finally:
        pool.end()
