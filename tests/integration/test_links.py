"""A leader's link and a worker's session over a real world: joining, computing, failing and leaving."""

import asyncio
import dataclasses
import errno
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from multiworld import Cause, World, WorldManager
from multiworld.ops.p2p import send_message
from multiworld_serving.common.edges.edges import Edges
from multiworld_serving.common.wire.inputs import BatchInputs, RowsLost
from multiworld_serving.common.wire.join import WORLD_BACKEND, JoinRequest
from multiworld_serving.common.wire.link import Link, LinkLostError
from multiworld_serving.common.wire.protocol import Body, Kind, Received
from multiworld_serving.common.wire.work import (
    Batch,
    Computed,
    Failed,
    Leaving,
    Loaded,
    Restart,
    Weights,
    WorkFailedError,
)
from multiworld_serving.server.leader.replicas.worker import (
    Ending,
    LinkEndedError,
    SelfTestError,
    SentBatch,
    SlotId,
    Worker,
)
from multiworld_serving.server.leader.replicas.worker_link import KeptOutput, Outcome, WorkerLink
from multiworld_serving.server.leader.versions.stage_plan import BundlePlan
from multiworld_serving.workers.compute.engine import Engine
from multiworld_serving.workers.session import Session
from tests.integration.members import managers
from tests.resnets import resnet_plan
from tests.sent_batches import send, worker_at
from tests.unit.edges.edge_parts import unused_edges

Plans = tuple[BundlePlan, ...]
IMAGE_SIZE = 32
WAIT_S = 60.0


@pytest.fixture(scope="module")
def plan() -> Plans:
    return resnet_plan("random:0", 2, image_size=IMAGE_SIZE)


@pytest.fixture(scope="module")
def second() -> Plans:
    """The same model with other weights."""
    return resnet_plan("random:1", 2, number=2, image_size=IMAGE_SIZE)


def ending_of(link: WorkerLink) -> Ending:
    assert link.worker.ending is not None, "the link has ended"
    return link.worker.ending


class Returned(NamedTuple):
    """A computed batch."""

    sent: SentBatch
    output: torch.Tensor | KeptOutput

    @property
    def rows(self) -> torch.Tensor:
        assert isinstance(self.output, torch.Tensor), "it is not kept"
        return self.output

    @property
    def kept(self) -> KeptOutput:
        assert isinstance(self.output, KeptOutput), "it is kept"
        return self.output


@dataclass
class Heard:
    """A listener that records its calls."""

    states: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    results: asyncio.Queue[Returned] = field(default_factory=asyncio.Queue)
    failures: asyncio.Queue[tuple[int, str]] = field(default_factory=asyncio.Queue)
    lost: asyncio.Queue[tuple[int, RowsLost]] = field(default_factory=asyncio.Queue)

    def on_state(self, link: WorkerLink) -> None:
        self.states.put_nowait(link.worker.state)

    def on_batch(
        self, worker: Worker, sent: SentBatch, outcome: Outcome, output: torch.Tensor | KeptOutput | None
    ) -> None:
        match outcome:
            case Failed(why):
                self.failures.put_nowait((sent.batch, why))
            case RowsLost():
                self.lost.put_nowait((sent.batch, outcome))
            case Computed():
                assert output is not None
                self.results.put_nowait(Returned(sent, output))

    async def until(self, state: str) -> None:
        while await self.states.get() != state:
            pass


@dataclass
class Pair:
    """The managers of a leader and a worker in one process; they share no state."""

    leader: WorldManager
    worker: WorldManager
    port: int
    engine: Engine
    heard: Heard = field(default_factory=Heard)
    tasks: list[asyncio.Task[object]] = field(default_factory=list)

    def link(self, *plans: BundlePlan, request: JoinRequest | None = None) -> WorkerLink:
        worker = worker_at(SlotId(plans[0].spec.index, 0), request)
        link = WorkerLink(worker, plans, self.heard.on_state, self.heard.on_batch)
        running = link.run(self.leader, "127.0.0.1", self.port, join_timeout_s=WAIT_S, max_batch_size=4, window=2)
        self.tasks.append(asyncio.create_task(running))
        return link

    async def world(self, link: WorkerLink) -> World:
        """The worker's side of the world of this link."""
        return await self.worker.initialize_world(
            *(link.worker.id.world, 1, 2, WORLD_BACKEND), port=self.port, generation=link.worker.generation
        )

    async def ready(self, plan: BundlePlan) -> tuple[WorkerLink, Session]:
        """A link that serves this stage, and the session of its worker."""
        link = self.link(plan)
        session = await self.session(link)
        await self.heard.until("ready")
        return link, session

    async def session(self, link: WorkerLink, own: Edges | None = None) -> Session:
        """The session of a worker that joins this link."""
        session = Session(await self.world(link), self.engine, own or unused_edges())
        self.tasks.append(asyncio.create_task(session.run()))
        return session


@asynccontextmanager
async def pair_with(engine: Engine) -> AsyncIterator[Pair]:
    """A pair whose worker has this engine, while the block lasts."""
    async with managers(2, secret="s", verify_collectives=False) as (leader, worker):
        made = Pair(leader, worker, leader.listen("127.0.0.1", 0), engine)
        yield made
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with pair_with(Engine(torch.device("cpu"))) as made:
        yield made
    made.engine.close()


async def claim(world: World, size_bytes: int) -> None:
    """Send the head of a message without the payload that it announces."""
    plan = send_message(world.facts, b"", None, 1 - world.rank, 0)
    plan.tensors = (torch.empty(size_bytes, dtype=torch.uint8, device="meta"),)
    await world.start(plan)


Lie = Callable[[Link, int, Any, memoryview], object]
"""Sends something instead of the result of a batch."""
LIES: dict[str, tuple[Lie, str]] = {
    "huge": (lambda link, *_: asyncio.ensure_future(claim(link.world, 2**32 - 1)), "a transfer of 4294967295 bytes"),
    "kept": (
        lambda link, number, done, rows: link.reply(number, Computed(1, 1, done.row_shape, 5)),
        "keeps an output that it must send",
    ),
    "leader's": (lambda link, *_: link.send(Restart()), "unexpected Restart from a worker"),
}
"""Each of these breaks the link, as do those of tests/unit/scheduling/test_link_outputs.py."""


def lying(session: Session, lie: Lie, of: type[Body] = Computed) -> None:
    """Let the session send this instead of its next result, or its next reply of another type."""
    link = session._link

    def reply(number: int, body: Body, payload: bytes | memoryview = b"", kind: Kind = Kind.REPLY) -> None:
        if isinstance(body, of):
            del link.reply
            lie(link, number, body, memoryview(payload))
        else:
            Link.reply(link, number, body, payload, kind)

    link.reply = reply  # type: ignore[method-assign]


@pytest.mark.parametrize("name", LIES)
async def test_link_breaks_when_a_result_does_not_match_its_batch(pair: Pair, plan: Plans, name: str) -> None:
    link, session = await pair.ready(plan[0])
    lie, refusal = LIES[name]
    lying(session, lie)
    send(link, 1, images(2), 1)
    await pair.heard.until("broken")
    assert ending_of(link).cause == "error"
    assert re.search(refusal, ending_of(link).detail)
    assert pair.heard.results.empty()
    assert pair.heard.failures.empty()


async def test_result_is_taken_once_and_only_for_its_batch(pair: Pair, plan: Plans) -> None:
    link, session = await pair.ready(plan[0])

    def thrice(own: Link, number: int, done: Computed, rows: memoryview) -> None:
        encoded = bytes(rows)
        for each in (number + 1000, number, number):
            own.reply(each, done, encoded)

    lying(session, thrice)
    send(link, 1, images(2), 1)
    await pair.heard.results.get()
    send(link, 2, images(2), 1)
    assert (await pair.heard.results.get()).sent.batch == 2
    assert pair.heard.results.empty()
    assert link.worker.state == "ready"


async def ask(link: WorkerLink, stage: int, inputs: BatchInputs, payload: bytes) -> Received:
    assert link._link is not None
    return await link._link.call(Batch(stage, 1, inputs), payload, timeout_s=WAIT_S)


BAD_BATCHES: dict[str, tuple[BatchInputs, int, str]] = {
    "more rows than assigned": (BatchInputs(5, (), None, tuple(range(5))), 5 * 3 * 32 * 32, "a batch of 5 rows"),
    "other image size": (BatchInputs(1, (), None, (0,)), 3 * 33 * 33, "3267 bytes; expected 3072"),
    "no payload": (BatchInputs(1, (), None, (0,)), 0, "have 0 bytes"),
    "packed rows": (BatchInputs(1, (), None, (0,), row_bytes=7), 7, r"rows of \(7,\)"),
    "rows without a place": (BatchInputs(1, (), None), 3072, "3072 bytes; expected 0"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
async def test_batch_fails_when_it_is_not_one_of_its_stage(pair: Pair, plan: Plans, name: str) -> None:
    link, _ = await pair.ready(plan[0])
    inputs, size, why = BAD_BATCHES[name]
    with pytest.raises(WorkFailedError, match=why):
        await ask(link, 0, inputs, bytes(size))
    await answered(pair, link, 1, version=1)


def ask_often(link: Link) -> None:
    for _ in range(4):
        link.ask(Batch(0, 1, BatchInputs(1, ())), b"", lambda _: None)


LEADERS_LIES: dict[str, tuple[Callable[[Link], object], str]] = {
    "stage that was not assigned": (
        lambda link: link.ask(Batch(1, 1, BatchInputs(1, ())), b"", lambda _: None),
        "stage 1, version 1, which is not assigned",
    ),
    "weights without a request": (
        lambda link: link.send(Weights(0, 1), b"1234"),
        "4 bytes of weights; expected 1 to 0",
    ),
    "too many batches": (ask_often, "a batch while 3 others have no result"),
    "worker's": (lambda link: link.send(Loaded()), "unexpected Loaded from a leader"),
    "huge": (lambda link: asyncio.ensure_future(claim(link.world, 2**32 - 1)), "a transfer of 4294967295 bytes"),
}


@pytest.mark.parametrize("name", LEADERS_LIES)
async def test_session_ends_when_the_leader_sends_what_it_may_not(pair: Pair, plan: Plans, name: str) -> None:
    link, _ = await pair.ready(plan[0])
    lie, refusal = LEADERS_LIES[name]
    assert link._link is not None
    lie(link._link)
    lost = await pair.tasks[-1]
    assert isinstance(lost, LinkLostError)
    assert lost.cause == Cause.ERROR
    assert re.search(refusal, str(lost))
    await pair.heard.until("broken")


async def test_link_does_not_become_ready_when_its_worker_leaves_meanwhile(pair: Pair, plan: Plans) -> None:
    def leave(own: Link, number: int, done: Computed, rows: memoryview) -> None:
        own.reply(number, done, rows)
        own.send(Leaving())

    link = pair.link(plan[0])
    lying(await pair.session(link), leave)  # with the self-test
    await pair.heard.until("broken")
    await asyncio.wait(pair.tasks[:1], timeout=WAIT_S)
    assert link.worker.state == "broken"
    assert pair.heard.states.empty()
    assert ending_of(link).cause == Cause.LEFT


@pytest.mark.parametrize("reply", [Restart(), Computed(1, 1, (5,))])
async def test_load_fails_when_the_worker_answers_something_else(
    pair: Pair, plan: Plans, second: Plans, reply: Body
) -> None:
    link, session = await pair.ready(plan[0])
    lying(session, lambda own, number, *_: own.reply(number, reply), of=Loaded)
    with pytest.raises(LinkEndedError, match=rf"unexpected {type(reply).__name__} about stage 0"):
        await link.load(second[:1])
    assert ending_of(link).cause == "error"


async def test_link_ends_when_the_worker_never_joins(plan: Plans) -> None:
    heard = Heard()
    async with WorldManager() as leader:
        port = leader.listen("127.0.0.1", 0)
        link = WorkerLink(worker_at(SlotId(0, 0)), plan[:1], heard.on_state, heard.on_batch)
        await link.run(leader, "127.0.0.1", port, join_timeout_s=0.5, max_batch_size=4, window=2)
    assert link.worker.state == "broken"
    assert ending_of(link).cause == Cause.TIMEOUT


async def test_link_ends_at_once_when_aborted_while_forming(pair: Pair, plan: Plans) -> None:
    former = pair.link(plan[0])
    await asyncio.sleep(0)
    former.fail(Cause.EXIT, "its worker has joined again")
    assert ending_of(former).cause == Cause.EXIT
    again = pair.link(plan[0])  # the same world, by name and generation
    await pair.session(again)
    await pair.heard.until("ready")
    assert ending_of(former).cause == Cause.EXIT


def images(rows: int = 1) -> torch.Tensor:
    return torch.full((rows, 3, IMAGE_SIZE, IMAGE_SIZE), 90, dtype=torch.uint8)


async def answered(pair: Pair, link: WorkerLink, batch: int, version: int) -> torch.Tensor:
    send(link, batch, images(), version)
    answer = await pair.heard.results.get()
    assert answer.sent.batch == batch
    return answer.rows


async def test_link_serves_two_versions_until_one_is_dropped(pair: Pair, plan: Plans, second: Plans) -> None:
    link, session = await pair.ready(plan[0])
    old = await answered(pair, link, 1, version=1)
    loading = asyncio.create_task(link.load(second[:1]))
    torch.testing.assert_close(await answered(pair, link, 2, version=1), old)
    await loading
    assert link.worker.loaded == {1, 2}
    new = await answered(pair, link, 3, version=2)
    assert not torch.allclose(new, old)
    torch.testing.assert_close(await answered(pair, link, 4, version=1), old)
    link.unload(1)
    torch.testing.assert_close(await answered(pair, link, 5, version=2), new)
    assert (1, 0) not in session._stages
    assert (link.worker.state, link.worker.loaded) == ("ready", {2})


def none_left(needed_bytes: int) -> None:
    raise MemoryError(f"it takes {needed_bytes} bytes, and 5 are left")


def failing_read(*_: int) -> bytes:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


BAD_VERSIONS = {
    "other weights than the reference's": "the join self-test failed",
    "weights that do not load": "the inputs differ from the graph's",
    "no memory": "5 are left",
    "the file cannot be read": "Input/output error",
    "the rows are lost": "cannot serve stage 0: far away",
}


@pytest.mark.parametrize("why", BAD_VERSIONS)
async def test_link_continues_serving_when_a_version_cannot_be_loaded(
    pair: Pair, plan: Plans, second: Plans, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = second[0]
    if why.startswith("other"):
        bad = dataclasses.replace(bad, weights=plan[0].weights)
    elif why.startswith("weights"):
        bad = dataclasses.replace(bad, weights=second[1].weights)
    link, session = await pair.ready(plan[0])
    if why == "the rows are lost":
        lying(session, lambda own, number, *_: own.reply(number, RowsLost("far away")))
    elif why == "no memory":
        monkeypatch.setattr("multiworld_serving.workers.stage_loader.check_memory", none_left)
    elif why.startswith("the file"):
        monkeypatch.setattr("multiworld_serving.server.leader.versions.stage_plan.os.pread", failing_read)
    with pytest.raises(SelfTestError, match=BAD_VERSIONS[why]):
        await link.load((bad,))
    link.unload(2)
    await answered(pair, link, 1, version=1)
    monkeypatch.undo()
    await link.load(second[:1])
    assert (link.worker.state, link.worker.loaded) == ("ready", {1, 2})
