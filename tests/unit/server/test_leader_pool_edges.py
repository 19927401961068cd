"""A frontend with data edges: it keeps images, fetches answers, and sends a request again when one of both is lost."""

import gc
import time
import weakref
from collections.abc import AsyncIterator
from types import SimpleNamespace

import msgspec
import pytest
import torch

from multiworld_serving.common.edges.edges import Edges
from multiworld_serving.common.service.errors import (
    DeadlineError,
    NoReplicaError,
    NotReadyError,
    OverloadedError,
)
from multiworld_serving.common.service.messages import Predict, Scrape
from multiworld_serving.common.service.predictor import ImageSizes, Prediction
from multiworld_serving.common.wire.inputs import ALL_ROWS, RowRef, RowsLostError, Source
from multiworld_serving.common.wire.protocol import Kind, Received, rows_payload
from multiworld_serving.server.frontend.leaders import resending
from tests.unit.edges.edge_parts import edges
from tests.unit.server.fake_leaders import FakeLeader, Pool, prediction
from tests.unit.server.image_model import image_classifier

IMAGE = torch.randint(0, 256, (3, 4, 4), dtype=torch.uint8)
ANSWERS = torch.rand(2, 2)
MODEL = image_classifier("m", "v1", ("?",) * 2, ImageSizes(4, 4))


class EdgeLeader(FakeLeader):
    """The only leader of a frontend. It answers with references to rows of a worker.

    Attributes:
        kept: where the answers are; None: in the frame.
        rest: rows of the answer that are in the frame.
        images: what a worker could fetch for each request: None if the image was in the frame.
    """

    kept: tuple[Source, ...] = ()
    rest = torch.empty(0, 2)
    unreachable = False
    """Whether workers cannot reach the frontend."""

    def __init__(self, frontend: Edges) -> None:
        self.frontend, self.made = frontend, Pool(frontend=frontend, model=MODEL)
        super().__init__(self.made.pool, 0)
        self.images: list[torch.Tensor | None] = []
        self.pool.links.append(self)
        self.tells()

    async def call(self, body: Predict | Scrape, payload: memoryview | bytes = b"", *, timeout_s: float) -> Received:
        reply = await super().call(body, payload, timeout_s=timeout_s)
        assert isinstance(body, Predict)
        number = body.tensor
        assert (number is None) == bool(payload)
        self.images.append(None if number is None else self.frontend.store.rows([RowRef(number, ALL_ROWS)]))
        if self.unreachable and number is not None:
            raise RowsLostError("far away")
        if not self.kept or body.relay:
            return reply
        answer = msgspec.structs.replace(prediction(), kept=self.kept)
        return Received(Kind.REPLY, 1, answer, rows_payload(self.rest))

    async def predict(self, images: torch.Tensor = IMAGE[None]) -> Prediction:
        """The answer of the frontend."""
        return await self.pool.predict(images, deadline_s=time.monotonic() + 30, request_id="mine")

    @property
    def last(self) -> Predict:
        body, _ = self.got[-1]
        assert isinstance(body, Predict)
        return body


@pytest.fixture
async def leader() -> AsyncIterator[EdgeLeader]:
    async with edges("f") as frontend:
        yield EdgeLeader(frontend)


def put(worker: Edges, answers: torch.Tensor) -> int:
    """The number of these answers, which the worker keeps."""
    number = worker.store.put("leader", answers)
    assert number is not None
    return number


async def test_image_stays_at_the_frontend_and_the_answer_at_the_worker(leader: EdgeLeader) -> None:
    async with edges("w") as worker:
        leader.kept = (Source(worker.holder, (RowRef(put(worker, ANSWERS), 1),), (0,)),)
        found = await leader.predict()
    assert torch.equal(found.output, ANSWERS[1:])
    assert (found.kept, found.attempts) == ((), 1)
    [image] = leader.images
    assert image is not None
    assert torch.equal(image, IMAGE[None])
    assert len(leader.frontend.store) == 0, "the image is freed with its answer"


@pytest.mark.parametrize("lost", ["input", "answer", "worker"])
async def test_request_is_sent_again_and_relayed_when_a_tensor_cannot_be_fetched(leader: EdgeLeader, lost: str) -> None:
    leader.unreachable = lost == "input"
    async with edges("w") as worker:
        leader.kept = (Source("127.0.0.1:1/abc" if lost == "worker" else worker.holder, (RowRef(99, 0),), (0,)),)
        found = await leader.predict()
    assert torch.equal(found.output, torch.tensor([[0.25, 0.75]]))
    assert found.attempts == 2
    assert leader.last.relay
    assert [payload == IMAGE.numpy().tobytes() for _, payload in leader.got] == [False, True]
    assert leader.made.resubmitted("relay") == 1


async def test_requests_are_relayed_for_longer_each_time_while_tensors_are_lost(
    leader: EdgeLeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(resending, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def relayed(after_s: float) -> bool:
        """Whether a request was relayed from the beginning."""
        nonlocal now_s
        now_s += after_s
        before = len(leader.got)
        await leader.predict()
        return len(leader.got) - before == 1 and leader.last.relay

    leader.unreachable = True
    assert [await relayed(each) for each in (0, 0.9, 0.2, 3.9, 0.2, 15.9)] == [False, True] * 3
    leader.unreachable = False
    assert not await relayed(0.2)
    leader.unreachable = True
    assert [await relayed(each) for each in (60, 0.9, 0.2)] == [False, True, False], "it was not soon after"


@pytest.mark.parametrize(
    ("errors", "kept"),
    [
        ((OverloadedError,), 0),
        ((NotReadyError,), 0),
        ((OverloadedError, NotReadyError), 0),
        ((NoReplicaError,), 1),
        ((DeadlineError,), 1),
        ((NoReplicaError, OverloadedError), 1),
        ((RuntimeError,), 1),
    ],
)
async def test_image_of_a_failed_request_is_freed_immediately_unless_a_leader_had_accepted_it(
    errors: tuple[type[Exception], ...], kept: int
) -> None:
    async with edges("f") as frontend:
        leader, image = EdgeLeader(frontend), IMAGE[None].clone()
        for number, error in enumerate(errors):
            link = FakeLeader(leader.pool, number) if number else leader
            link.answers = [error("as this test wants")]
            leader.pool.links[number:] = [link]
            link.tells()
        alive = weakref.ref(image)
        gc.collect()
        gc.disable()  # a cycle of references would keep the image for long
        try:
            with pytest.raises(errors[-1]):
                await leader.predict(image)
            del image
            assert (len(frontend.store), alive() is not None) == (kept, bool(kept))
        finally:
            gc.enable()


async def test_image_is_sent_when_the_memory_for_edges_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiworld_serving.common.edges.edges._MAX_KEPT_BYTES", 10)
    async with edges("f") as frontend:
        leader = EdgeLeader(frontend)
        await leader.predict()
    assert leader.images == [None]


async def test_rows_of_one_request_come_from_workers_and_from_the_leader_in_their_order(leader: EdgeLeader) -> None:
    async with edges("a") as first, edges("b") as second:
        rows = torch.rand(4, 2)
        one, other = (
            put(worker, torch.cat([torch.zeros(1, 2), rows[own]])) for worker, own in ((first, [3, 0]), (second, [2]))
        )
        leader.kept = (
            Source(first.holder, (RowRef(one, 1), RowRef(one, 2)), (3, 0)),
            Source(second.holder, (RowRef(other, 1),), (2,)),
        )
        leader.rest = rows[1:2]
        images = torch.stack([IMAGE + at for at in range(4)])
        found = await leader.predict(images)
    assert torch.equal(found.output, rows)
    assert leader.last.rows == 4
    [sent] = leader.images
    assert sent is not None
    assert torch.equal(sent, images)
