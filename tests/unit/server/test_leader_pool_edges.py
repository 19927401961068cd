"""A frontend with data edges: it keeps images, fetches answers, and sends a request again when one of both is lost."""

import time

import msgspec
import pytest
import torch

from multiworld_serving.common.edges.edges import Edges
from multiworld_serving.common.wire.inputs import ALL_ROWS, RowRef, Source
from multiworld_serving.common.wire.protocol import Kind, Received, rows_payload
from multiworld_serving.server.errors import InputUnreachableError
from multiworld_serving.server.frontends.leader_pool import LeaderPool
from multiworld_serving.server.frontends.messages import Predict, Rejection, Scrape
from multiworld_serving.server.predictor import ImageSizes, Prediction
from tests.unit.edges.edge_parts import edges
from tests.unit.server.fake_leaders import FakeLeader, Pool, prediction
from tests.unit.server.image_model import image_classifier

IMAGE = torch.randint(0, 256, (3, 4, 4), dtype=torch.uint8)
ANSWERS = torch.rand(2, 2)
MODEL = image_classifier("m", "v1", ("?",) * 2, ImageSizes(4, 4))


class EdgeLeader(FakeLeader):
    """Answers with references to rows of a worker.

    Attributes:
        kept: where the answers are; None: in the frame.
        rest: rows of the answer that are in the frame.
        images: what a worker could fetch for each request: None if the image was in the frame.
    """

    kept: tuple[Source, ...] = ()
    rest = torch.empty(0, 2)
    unreachable = False
    frontend: Edges

    def __init__(self, pool: LeaderPool, frontend: Edges) -> None:
        super().__init__(pool, 0)
        self.frontend = frontend
        self.images: list[torch.Tensor | None] = []
        pool.links.append(self)
        self.tells()

    async def call(self, body: Predict | Scrape, payload: memoryview | bytes = b"", *, timeout_s: float) -> Received:
        reply = await super().call(body, payload, timeout_s=timeout_s)
        assert isinstance(body, Predict)
        number = body.tensor
        assert (number is None) == bool(payload)
        self.images.append(None if number is None else self.frontend.store.rows([RowRef(number, ALL_ROWS)]))
        if self.unreachable and number is not None:
            raise Rejection.of(InputUnreachableError("far away")).error()
        if not self.kept or not body.fetches:
            return reply
        answer = msgspec.structs.replace(prediction(), kept=self.kept)
        return Received(Kind.REPLY, 1, answer, rows_payload(self.rest))

    @property
    def last(self) -> Predict:
        body, _ = self.got[-1]
        assert isinstance(body, Predict)
        return body


async def predict(pool: LeaderPool) -> Prediction:
    return await pool.predict(IMAGE[None], deadline_s=time.monotonic() + 30, request_id="mine")


async def test_image_stays_at_the_frontend_and_the_answer_at_the_worker() -> None:
    async with edges("f") as frontend, edges("w") as worker:
        made = Pool(frontend=frontend, model=MODEL)
        leader = EdgeLeader(made.pool, frontend)
        number = worker.store.put("leader", ANSWERS)
        assert number is not None
        leader.kept = (Source(worker.holder, (RowRef(number, 1),), (0,)),)
        found = await predict(made.pool)
        assert torch.equal(found.output, ANSWERS[1:])
        assert (found.kept, found.attempts) == ((), 1)
        [image] = leader.images
        assert image is not None
        assert torch.equal(image, IMAGE[None])
        assert len(frontend.store) == 0, "the image is freed with its answer"


@pytest.mark.parametrize("gone", [True, False])
async def test_request_is_sent_again_and_its_answer_relayed_when_it_cannot_be_fetched(gone: bool) -> None:
    async with edges("f") as frontend, edges("w") as worker:
        made = Pool(frontend=frontend, model=MODEL)
        leader = EdgeLeader(made.pool, frontend)
        holder = worker.holder if gone else "127.0.0.1:1/abc"
        leader.kept = (Source(holder, (RowRef(99, 0),), (0,)),)
        found = await predict(made.pool)
        assert torch.equal(found.output, torch.tensor([[0.25, 0.75]]))
        assert found.attempts == 2
        assert (leader.last.fetches, leader.last.unreachable) == (False, None if gone else holder)
        assert made.resubmitted("answer_lost") == 1


async def test_images_are_sent_until_the_link_is_formed_again_when_a_worker_cannot_fetch_one() -> None:
    async with edges("f") as frontend:
        made = Pool(frontend=frontend, model=MODEL)
        leader = EdgeLeader(made.pool, frontend)
        leader.unreachable = True
        await predict(made.pool)
        await predict(made.pool)
        assert [payload == IMAGE.numpy().tobytes() for _, payload in leader.got] == [False, True, True]
        assert made.resubmitted("relay") == 1
        leader.unreachable = False
        leader._on_lost()
        leader.tells()
        await predict(made.pool)
        assert leader.images[-1] is not None


async def test_image_is_sent_when_the_memory_for_edges_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiworld_serving.common.edges.edges._MAX_KEPT_BYTES", 10)
    async with edges("f") as frontend:
        made = Pool(frontend=frontend, model=MODEL)
        leader = EdgeLeader(made.pool, frontend)
        await predict(made.pool)
        assert leader.images == [None]


async def test_rows_of_one_request_come_from_workers_and_from_the_leader_in_their_order() -> None:
    async with edges("f") as frontend, edges("a") as first, edges("b") as second:
        made = Pool(frontend=frontend, model=MODEL)
        leader = EdgeLeader(made.pool, frontend)
        rows, numbers = torch.rand(4, 2), []
        for worker, own in ((first, [3, 0]), (second, [2])):
            numbers.append(worker.store.put("leader", torch.cat([torch.zeros(1, 2), rows[own]])))
        assert numbers[0] is not None
        assert numbers[1] is not None
        leader.kept = (
            Source(first.holder, (RowRef(numbers[0], 1), RowRef(numbers[0], 2)), (3, 0)),
            Source(second.holder, (RowRef(numbers[1], 1),), (2,)),
        )
        leader.rest = rows[1:2]
        images = torch.stack([IMAGE + at for at in range(4)])
        found = await made.pool.predict(images, deadline_s=time.monotonic() + 30, request_id="mine")
        assert torch.equal(found.output, rows)
        assert leader.last.rows == 4
        [sent] = leader.images
        assert sent is not None
        assert torch.equal(sent, images)
