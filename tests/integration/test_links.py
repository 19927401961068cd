"""A leader's link and a worker's session over a real world: joining, computing, failing and leaving."""

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from multiworld import BrokenWorldException, Cause, WorldManager
from multiworld_serving.common.edges.edges import Edges
from multiworld_serving.common.wire.channel import Channel
from multiworld_serving.common.wire.inputs import LostInput
from multiworld_serving.common.wire.join import WORLD_BACKEND, StageAssignment
from multiworld_serving.common.wire.message import Message, MessageKind
from multiworld_serving.models.bundle.stage import BundleStageSpec
from multiworld_serving.server.replicas.worker import Ending, LinkEndedError, SelfTestError, SentBatch, SlotId
from multiworld_serving.server.replicas.worker_link import WorkerLink
from multiworld_serving.server.versions.stage_plan import StagePlan
from multiworld_serving.workers.compute.engine import Engine
from multiworld_serving.workers.leader_order import LeaderPlace
from multiworld_serving.workers.session import Session
from tests.chaos.lies import LIES, RawMessage, claim, lying, whole
from tests.resnets import resnet_plan, with_other_weights
from tests.sent_batches import send, worker_at
from tests.unit.edges.edge_parts import unused_edges

IMAGE_SIZE = 32
WAIT_S = 60.0


@pytest.fixture(scope="module")
def plan() -> tuple[StagePlan, ...]:
    return resnet_plan("random:0", 2, image_size=IMAGE_SIZE)


@pytest.fixture(scope="module")
def second() -> tuple[StagePlan, ...]:
    """The same model with other weights."""
    return resnet_plan("random:1", 2, number=2, image_size=IMAGE_SIZE)


def ending_of(link: WorkerLink) -> Ending:
    assert link.worker.ending is not None, "the link has ended"
    return link.worker.ending


@dataclass
class Heard:
    """A listener that records its calls."""

    states: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    results: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    failures: asyncio.Queue[tuple[int, str]] = field(default_factory=asyncio.Queue)
    lost: asyncio.Queue[tuple[int, LostInput]] = field(default_factory=asyncio.Queue)
    leaving: asyncio.Event = field(default_factory=asyncio.Event)

    def on_state(self, link: WorkerLink) -> None:
        self.states.put_nowait(link.worker.state)
        if link.worker.state == "draining":
            self.leaving.set()

    def on_batch(self, link: WorkerLink, message: Message, sent: SentBatch) -> None:
        match message.kind:
            case MessageKind.FAILED:
                self.failures.put_nowait((message.batch, message.text()))
            case MessageKind.INPUT_LOST:
                self.lost.put_nowait((message.batch, LostInput.from_json(message.text())))
            case _:
                self.results.put_nowait(message)

    async def until(self, state: str) -> None:
        async with asyncio.timeout(WAIT_S):
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

    def link(self, *plans: StagePlan, slot: SlotId | None = None) -> WorkerLink:
        slot = slot or SlotId(plans[0].spec.index, 0)
        link = WorkerLink(worker_at(slot), plans, self.heard.on_state, self.heard.on_batch)
        running = link.run(self.leader, "127.0.0.1", self.port, join_timeout_s=WAIT_S, max_batch_size=4, window=2)
        self.tasks.append(asyncio.create_task(running))
        return link

    async def session(self, link: WorkerLink) -> Session:
        return await session_of(link, self.worker, self.port, self.tasks, self.engine)


async def session_of(
    link: WorkerLink,
    worker: WorldManager,
    port: int,
    tasks: list[asyncio.Task[object]],
    engine: Engine,
    own: Edges | None = None,
    place: LeaderPlace | None = None,
) -> Session:
    """The session of a worker that joins this link."""
    world = await worker.initialize_world(
        *(link.worker.id.world, 1, 2, WORLD_BACKEND), addr="127.0.0.1", port=port, generation=link.worker.generation
    )
    session = Session(world, engine, unused_edges() if own is None else own, place=place)
    tasks.append(asyncio.create_task(session.run()))
    return session


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with (
        WorldManager(secret="s", verify_collectives=False) as leader,
        WorldManager(secret="s", verify_collectives=False) as worker,
    ):
        made = Pair(leader, worker, leader.listen("127.0.0.1", 0), Engine(torch.device("cpu")))
        yield made
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)
        made.engine.close()


REFUSALS = {
    "huge": r"expected torch.float32, 2 rows of \(128, 4, 4\)",
    "no-payload": "got no payload",
    "other-batch": "batch 1001, which is not in flight",
    "twice": "batch 1, which is not in flight",
    "failed-other-batch": "batch 1001, which is not in flight",
    "failed-at-length": "expected torch.uint8, 0 to 65536 rows",
    "not-text": "expected torch.uint8, 0 to 65536 rows",
    "leader's": r"unexpected BATCH \d+ from a worker",
    "garbage": "not a message of this version",
}


@pytest.mark.parametrize("lie", LIES)
async def test_link_breaks_when_a_result_does_not_match_its_batch(
    pair: Pair, plan: tuple[StagePlan, ...], lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = pair.link(plan[0])
    await pair.session(link)
    await pair.heard.until("ready")
    monkeypatch.setattr(Channel, "send", lying_worker(link, lie))
    send(link, 1, images(2), 1)
    await pair.heard.until("broken")
    assert ending_of(link).cause == "error"
    assert re.search(
        REFUSALS.get(lie, r"RESULT: expected torch.float32, 2 rows of \(128, 4, 4\), got"), ending_of(link).detail
    )
    assert pair.heard.results.qsize() == (lie == "twice")
    assert pair.heard.failures.empty()


def lying_worker(link: WorkerLink, lie: str) -> Any:
    """Replaces `Channel.send` for the worker only; the leader in the same process still sends correct messages."""
    truth, lies = Channel.send, lying(lie)

    async def send(self: Channel, message: Message) -> None:
        await (truth if self is link._channel else lies)(self, message)

    return send


BATCH = (MessageKind.BATCH, 1, torch.uint8)
LEADERS_LIES: dict[str, tuple[RawMessage, str]] = {
    "size 0": (claim(*BATCH, (1, 3, IMAGE_SIZE, IMAGE_SIZE), 0), "0 bytes are not torch.uint8"),
    "more rows than ordered": (
        claim(*BATCH, (5, 3, 32, 32), 5 * 3 * 32 * 32),
        "expected torch.uint8, 1 to 4 rows",
    ),
    "no rows": (claim(*BATCH, (0, 3, 32, 32), 0), "expected torch.uint8, 1 to 4 rows"),
    "other image size": (claim(*BATCH, (1, 3, 33, 33), 3 * 33 * 33), r"rows of \(3, 32, 32\), got"),
    "other dtype": (
        claim(MessageKind.BATCH, 1, torch.float32, (1, 3, 32, 32), 4 * 3 * 32 * 32),
        "expected torch.uint8",
    ),
    "no payload": (whole(Message(MessageKind.BATCH, 1, version=1)), "got no payload"),
    "stage that was not ordered": (
        whole(Message(MessageKind.BATCH, 1, torch.zeros(1, 64, 8, 8), stage=1, version=1)),
        "stage 1, version 1, which is not assigned",
    ),
    "weights without an order": (
        claim(MessageKind.WEIGHTS, 0, torch.uint8, (1 << 30,), 1 << 30),
        "expected torch.uint8, 1 to 0 rows",
    ),
    "long order": (claim(MessageKind.ASSIGN, 0, torch.uint8, (1 << 30,), 1 << 30), "0 to 65536 rows"),
    "drop with a payload": (
        claim(MessageKind.UNLOAD, 0, torch.uint8, (1 << 30,), 1 << 30),
        "expected no payload",
    ),
}


@pytest.mark.parametrize("lie", LEADERS_LIES)
async def test_session_ends_when_the_leader_sends_an_unannounced_batch(
    pair: Pair, plan: tuple[StagePlan, ...], lie: str
) -> None:
    link = pair.link(plan[0])
    await pair.session(link)
    await pair.heard.until("ready")
    message, rejection = LEADERS_LIES[lie]
    assert link._world is not None
    with contextlib.suppress(BrokenWorldException):
        await message.send(link._world, 1)
    ending = await pair.tasks[-1]
    assert isinstance(ending, BrokenWorldException)
    assert ending.cause == Cause.ERROR
    assert re.search(rejection, ending.detail)


async def test_link_breaks_at_once_when_a_batch_cannot_be_sent(pair: Pair, plan: tuple[StagePlan, ...]) -> None:
    link = pair.link(plan[0])
    await pair.session(link)
    await pair.heard.until("ready")
    send(link, 1, images().bool(), 1)
    await pair.heard.until("broken")
    assert (ending_of(link).cause, ending_of(link).leader_unresponsive) == (Cause.ABORTED, True)
    assert "BATCH 1 cannot be sent: ValueError: cannot send torch.bool" in ending_of(link).detail


async def test_link_never_serves_when_the_join_self_test_fails(pair: Pair, plan: tuple[StagePlan, ...]) -> None:
    link = pair.link(with_other_weights(plan[1]))
    await pair.session(link)
    await pair.heard.until("broken")
    assert ending_of(link).cause == "error"
    assert "self-test" in ending_of(link).detail


async def take_order(channel: Channel) -> None:
    """Read one assignment, fetch its weights as a worker does, and discard them."""
    message = await channel.receive()
    left = StageAssignment.from_json(message.text()).weights_bytes
    await fetch(channel, message)
    while left:
        piece = (await channel.receive()).payload
        assert piece is not None
        left -= piece.nbytes


async def fetch(channel: Channel, message: Message) -> None:
    """Ask for the weights of this assignment."""
    stage = BundleStageSpec.from_json(StageAssignment.from_json(message.text()).spec).index
    await channel.send(Message(MessageKind.FETCH_WEIGHTS, stage=stage, version=message.version))


async def scripted_worker(pair: Pair, link: WorkerLink) -> Channel:
    """A worker that sends what the test specifies."""
    world = await pair.worker.initialize_world(
        link.worker.id.world, 1, 2, WORLD_BACKEND, addr="127.0.0.1", port=pair.port, generation=link.worker.generation
    )
    return Channel(world, 0, lambda _: None)


async def serving_script(pair: Pair, link: WorkerLink, plan: StagePlan) -> Channel:
    """A scripted worker that has become ready."""
    channel = await scripted_worker(pair, link)
    await take_order(channel)
    stage, version = plan.spec.index, plan.number
    await channel.send(Message(MessageKind.READY, stage=stage, version=version))
    await channel.receive()
    await channel.send(Message(MessageKind.RESULT, payload=plan.self_test_output, stage=stage, version=version))
    await pair.heard.until("ready")
    return channel


@pytest.mark.parametrize(("stage", "version"), [(0, 1), (1, 2)])
async def test_load_fails_when_the_worker_answers_about_another_stage_or_version(
    pair: Pair, plan: tuple[StagePlan, ...], second: tuple[StagePlan, ...], stage: int, version: int
) -> None:
    link = pair.link(plan[0])
    channel = await serving_script(pair, link, plan[0])
    loading = asyncio.create_task(link.load(second[:1]))
    await take_order(channel)
    await channel.send(Message(MessageKind.READY, stage=stage, version=version))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(LinkEndedError, match=r"READY of stage \d, version \d; expected stage 0, version 2"):
            await loading
    assert ending_of(link).cause == "error"


async def test_link_reports_a_leaving_worker_and_closes_when_told(pair: Pair, plan: tuple[StagePlan, ...]) -> None:
    link = pair.link(plan[0])
    session = await pair.session(link)
    await pair.heard.until("ready")
    await session.leave()
    async with asyncio.timeout(WAIT_S):
        await pair.heard.leaving.wait()
    assert link.worker.state == "draining"
    link.close()
    await pair.heard.until("broken")
    assert ending_of(link).cause == Cause.LEFT


async def test_link_ends_when_the_worker_never_joins(plan: tuple[StagePlan, ...]) -> None:
    heard = Heard()
    async with WorldManager() as leader:
        port = leader.listen("127.0.0.1", 0)
        link = WorkerLink(worker_at(SlotId(0, 0)), plan[:1], heard.on_state, heard.on_batch)
        await link.run(leader, "127.0.0.1", port, join_timeout_s=0.5, max_batch_size=4, window=2)
    assert link.worker.state == "broken"
    assert ending_of(link).cause == Cause.TIMEOUT


async def test_link_ends_at_once_when_aborted_while_forming(pair: Pair, plan: tuple[StagePlan, ...]) -> None:
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
    async with asyncio.timeout(WAIT_S):
        answer = await pair.heard.results.get()
    assert answer.batch == batch
    assert answer.payload is not None
    return answer.payload


async def test_link_serves_two_versions_until_one_is_dropped(
    pair: Pair, plan: tuple[StagePlan, ...], second: tuple[StagePlan, ...]
) -> None:
    link = pair.link(plan[0])
    session = await pair.session(link)
    await pair.heard.until("ready")
    old = await answered(pair, link, 1, version=1)
    loading = asyncio.create_task(link.load(second[:1]))
    torch.testing.assert_close(await answered(pair, link, 2, version=1), old)
    async with asyncio.timeout(WAIT_S):
        await loading
    assert link.worker.loaded == {1, 2}
    new = await answered(pair, link, 3, version=2)
    assert not torch.allclose(new, old)
    torch.testing.assert_close(await answered(pair, link, 4, version=1), old)
    link.unload(1)
    torch.testing.assert_close(await answered(pair, link, 5, version=2), new)
    assert (1, 0) not in session._place.stages
    assert (link.worker.state, link.worker.loaded) == ("ready", {2})


def none_left(needed_bytes: int) -> None:
    raise MemoryError(f"it takes {needed_bytes} bytes, and 5 are left")


BAD_VERSIONS = {
    "other weights than the reference's": "the join self-test failed",
    "weights that do not load": "the inputs differ from the graph's",
    "no memory": "5 are left",
}


@pytest.mark.parametrize("why", BAD_VERSIONS)
async def test_link_continues_serving_when_a_version_cannot_be_loaded(
    pair: Pair, plan: tuple[StagePlan, ...], second: tuple[StagePlan, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = second[0]
    if why.startswith("other"):
        bad = dataclasses.replace(bad, weights=plan[0].weights)
    elif why.startswith("weights"):
        bad = dataclasses.replace(bad, weights=second[1].weights)
    link = pair.link(plan[0])
    await pair.session(link)
    await pair.heard.until("ready")
    if why == "no memory":
        monkeypatch.setattr("multiworld_serving.workers.stage_loader.check_memory", none_left)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(SelfTestError, match=BAD_VERSIONS[why]):
            await link.load((bad,))
        link.unload(2)
        await answered(pair, link, 1, version=1)
        monkeypatch.undo()
        await link.load(second[:1])
    assert (link.worker.state, link.worker.loaded) == ("ready", {1, 2})


async def test_load_ends_when_the_link_breaks(
    pair: Pair, plan: tuple[StagePlan, ...], second: tuple[StagePlan, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = pair.link(plan[0])
    await pair.session(link)
    await pair.heard.until("ready")
    monkeypatch.setattr(pair.engine, "load", lambda *_: asyncio.Event().wait())  # it never returns
    loading = asyncio.create_task(link.load(second[:1]))
    await answered(pair, link, 1, version=1)
    link.fail(Cause.HANG, "no answer")
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(LinkEndedError, match="was lost"):
            await loading
        with pytest.raises(LinkEndedError, match="broken"):
            await link.load(second[:1])
