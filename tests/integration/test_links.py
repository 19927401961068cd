"""A leader's link and a worker's session over a real world: coming up, computing, failing, leaving."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import safetensors.torch
import torch

from models import Tuning, load_model, reference_stage
from multiworld import Cause, WorldManager
from server.link import CanaryError, Link, LinkEndedError
from server.plan import StagePlan, make_plan
from server.slots import Slot
from wire import WORLD_BACKEND, Channel, JoinOffer, JoinRequest, Message, StageOrder
from workers.engine import Engine
from workers.session import Session

IMAGE_SIZE = 32
WAIT_S = 60.0
REQUEST = JoinRequest("w", "cpu", "here", 1)


@pytest.fixture(scope="module")
def plan() -> tuple[StagePlan, ...]:
    return make_plan(load_model("resnet18", "random:0", image_size=IMAGE_SIZE), 2)


@pytest.fixture(scope="module")
def second() -> tuple[StagePlan, ...]:
    """The same model with other weights."""
    return make_plan(load_model("resnet18", "random:1", image_size=IMAGE_SIZE), 2, number=2)


@dataclass
class Heard:
    """A listener that writes down what it hears."""

    states: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    results: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    failures: asyncio.Queue[tuple[int, str]] = field(default_factory=asyncio.Queue)
    leaving: asyncio.Event = field(default_factory=asyncio.Event)

    def on_link_state(self, link: Link) -> None:
        self.states.put_nowait(link.state)

    def on_result(self, link: Link, message: Message) -> None:
        self.results.put_nowait(message)

    def on_failed(self, link: Link, message: Message) -> None:
        self.failures.put_nowait((message.batch, message.text()))

    def on_leaving(self, link: Link) -> None:
        self.leaving.set()

    async def until(self, state: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while await self.states.get() != state:
                pass


@dataclass
class Pair:
    """A leader's and a worker's manager in one process, which is enough: they share nothing."""

    leader: WorldManager
    worker: WorldManager
    port: int
    engine: Engine
    heard: Heard = field(default_factory=Heard)
    tasks: list[asyncio.Task[object]] = field(default_factory=list)

    def link(self, *plans: StagePlan, slot: Slot | None = None) -> Link:
        slot = slot or Slot(plans[0].spec.index, 0)
        link = Link(plans=plans, slot=slot, epoch=1, request=REQUEST, listener=self.heard, batches=self.heard)
        running = link.run(self.leader, "127.0.0.1", self.port, join_timeout_s=WAIT_S, max_batch_size=4, window=2)
        self.tasks.append(asyncio.create_task(running))
        return link

    async def session(self, link: Link) -> Session:
        offer = JoinOffer(link.world_name, link.epoch)
        world = await self.worker.initialize_world(
            offer.world, 1, 2, WORLD_BACKEND, addr="127.0.0.1", port=self.port, epoch=offer.epoch
        )
        session = Session(world, self.engine)
        self.tasks.append(asyncio.create_task(session.run()))
        return session


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with WorldManager(secret="s", checked=False) as leader, WorldManager(secret="s", checked=False) as worker:
        made = Pair(leader, worker, leader.listen("127.0.0.1", 0), Engine(torch.device("cpu")))
        yield made
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)
        made.engine.close()


@pytest.mark.parametrize("stage", [0, 1])
async def test_link_computes_what_the_reference_does_when_it_is_ready(
    pair: Pair, plan: tuple[StagePlan, ...], stage: int
) -> None:
    link = pair.link(plan[stage])
    await pair.session(link)
    await pair.heard.until("ready")
    model = load_model("resnet18", "random:0", image_size=IMAGE_SIZE)
    batches = {
        number: torch.randint(0, 256, (number, *plan[stage].input_shape)).to(plan[stage].input_dtype)
        for number in (1, 2, 3)
    }
    for number, batch in batches.items():
        link.send(number, batch, 1)
    async with asyncio.timeout(WAIT_S):
        answers = [await pair.heard.results.get() for _ in batches]
    with torch.inference_mode():
        for answer in answers:
            expected = reference_stage(model, plan[stage].spec)(batches[answer.batch])
            assert answer.payload is not None
            torch.testing.assert_close(answer.payload, expected, rtol=1e-3, atol=1e-4)
            assert answer.compute_ns > 0


async def test_worker_goes_on_when_its_stage_raises(pair: Pair, plan: tuple[StagePlan, ...]) -> None:
    link = pair.link(plan[0])
    await pair.session(link)
    await pair.heard.until("ready")
    link.send(7, torch.zeros(1, 5, 5), 1)  # not uint8 [B,3,H,W]
    async with asyncio.timeout(WAIT_S):
        batch, error = await pair.heard.failures.get()
        assert batch == 7
        assert "uint8" in error
        link.send(8, torch.zeros(1, 3, IMAGE_SIZE, IMAGE_SIZE, dtype=torch.uint8), 1)
        assert (await pair.heard.results.get()).batch == 8
    assert link.state == "ready"


async def test_link_never_serves_when_the_canary_comes_back_wrong(pair: Pair, plan: tuple[StagePlan, ...]) -> None:
    weights = safetensors.torch.load(plan[1].weights)
    weights["fc.bias"] = weights["fc.bias"] + torch.linspace(-5, 5, len(weights["fc.bias"]))
    lying = dataclasses.replace(plan[1], weights=safetensors.torch.save(weights))
    link = pair.link(lying)
    await pair.session(link)
    await pair.heard.until("broken")
    assert link.cause == "error"
    assert "canary" in link.detail


async def test_link_never_serves_when_the_weights_do_not_load(pair: Pair, plan: tuple[StagePlan, ...]) -> None:
    link = pair.link(dataclasses.replace(plan[1], weights=plan[0].weights))
    await pair.session(link)
    await pair.heard.until("broken")
    assert link.cause == "error"
    assert "fc.weight" in link.detail


async def test_link_breaks_when_the_worker_talks_nonsense(pair: Pair, plan: tuple[StagePlan, ...]) -> None:
    link = pair.link(plan[0])
    world = await pair.worker.initialize_world(
        link.world_name, 1, 2, WORLD_BACKEND, addr="127.0.0.1", port=pair.port, epoch=link.epoch
    )
    channel = Channel(world, 0, 1 << 30)
    left = StageOrder.from_json((await channel.receive()).text()).weights_bytes
    while left:
        piece = (await channel.receive()).payload
        assert piece is not None
        left -= piece.nbytes
    await world.send(torch.full((64,), 7, dtype=torch.uint8), 0)
    await pair.heard.until("broken")
    assert link.cause == "error"
    assert "not a message" in link.detail


async def test_link_tells_when_the_worker_leaves_and_closes_when_told(pair: Pair, plan: tuple[StagePlan, ...]) -> None:
    link = pair.link(plan[0])
    session = await pair.session(link)
    await pair.heard.until("ready")
    await session.leave()
    async with asyncio.timeout(WAIT_S):
        await pair.heard.leaving.wait()
    assert link.state == "draining"
    link.close()
    await pair.heard.until("broken")
    assert link.cause == Cause.LEFT


async def test_link_ends_when_the_worker_never_comes(plan: tuple[StagePlan, ...]) -> None:
    heard = Heard()
    async with WorldManager() as leader:
        port = leader.listen("127.0.0.1", 0)
        link = Link(plans=plan[:1], slot=Slot(0, 0), epoch=1, request=REQUEST, listener=heard, batches=heard)
        await link.run(leader, "127.0.0.1", port, join_timeout_s=0.5, max_batch_size=4, window=2)
    assert link.state == "broken"
    assert link.cause == Cause.TIMEOUT


async def test_link_is_over_at_once_when_it_is_given_up_while_it_forms(pair: Pair, plan: tuple[StagePlan, ...]) -> None:
    former = pair.link(plan[0])
    await asyncio.sleep(0)
    former.give_up(Cause.EXIT, "its worker has joined again")
    assert (former.state, former.cause) == ("broken", Cause.EXIT)
    again = pair.link(plan[0])  # the same world, by name and epoch
    await pair.session(again)
    await pair.heard.until("ready")
    assert former.cause == Cause.EXIT


async def test_link_is_over_at_once_when_it_is_given_up_while_it_serves(
    pair: Pair, plan: tuple[StagePlan, ...]
) -> None:
    link = pair.link(plan[0])
    await pair.session(link)
    await pair.heard.until("ready")
    link.give_up(Cause.HANG, "no answer")
    assert (link.state, link.cause) == ("broken", Cause.HANG)
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*pair.tasks)
    assert link.cause == Cause.HANG


def images(rows: int = 1) -> torch.Tensor:
    return torch.full((rows, 3, IMAGE_SIZE, IMAGE_SIZE), 90, dtype=torch.uint8)


async def answered(pair: Pair, link: Link, batch: int, version: int) -> torch.Tensor:
    link.send(batch, images(), version)
    async with asyncio.timeout(WAIT_S):
        answer = await pair.heard.results.get()
    assert answer.batch == batch
    assert answer.payload is not None
    return answer.payload


async def test_link_serves_two_versions_until_one_is_dropped(
    pair: Pair, plan: tuple[StagePlan, ...], second: tuple[StagePlan, ...]
) -> None:
    link = pair.link(plan[0])
    await pair.session(link)
    await pair.heard.until("ready")
    old = await answered(pair, link, 1, version=1)
    loading = asyncio.create_task(link.load(second[:1]))
    torch.testing.assert_close(await answered(pair, link, 2, version=1), old)
    async with asyncio.timeout(WAIT_S):
        await loading
    assert link.holds == {1, 2}
    new = await answered(pair, link, 3, version=2)
    assert not torch.allclose(new, old)
    torch.testing.assert_close(await answered(pair, link, 4, version=1), old)
    link.drop(1)
    link.send(5, images(), 1)
    async with asyncio.timeout(WAIT_S):
        assert (await pair.heard.failures.get())[0] == 5
    torch.testing.assert_close(await answered(pair, link, 6, version=2), new)
    assert (link.state, link.holds) == ("ready", {2})


def none_left(needed_bytes: int) -> None:
    raise MemoryError(f"it takes {needed_bytes} bytes, and 5 are left")


BAD_VERSIONS = {
    "other weights than the reference's": "wrong answer to the canary",
    "weights that do not load": "conv1.weight",
    "no memory": "5 are left",
}


@pytest.mark.parametrize("why", BAD_VERSIONS)
async def test_link_serves_on_when_a_version_cannot_be_loaded(
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
        monkeypatch.setattr("workers.session.check_memory", none_left)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(CanaryError, match=BAD_VERSIONS[why]):
            await link.load((bad,))
        link.drop(2)
        await answered(pair, link, 1, version=1)
        monkeypatch.undo()
        await link.load(second[:1])
    assert (link.state, link.holds) == ("ready", {1, 2})


async def test_load_ends_when_the_link_breaks(
    pair: Pair, plan: tuple[StagePlan, ...], second: tuple[StagePlan, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = pair.link(plan[0])
    session = await pair.session(link)
    await pair.heard.until("ready")
    monkeypatch.setattr(session.place, "load", lambda *_: asyncio.Event().wait())  # it never comes back
    loading = asyncio.create_task(link.load(second[:1]))
    await answered(pair, link, 1, version=1)
    link.give_up(Cause.HANG, "no answer")
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(LinkEndedError, match="went while it loaded"):
            await loading
        with pytest.raises(LinkEndedError, match="broken"):
            await link.load(second[:1])


async def test_load_ends_when_the_worker_leaves(
    pair: Pair, plan: tuple[StagePlan, ...], second: tuple[StagePlan, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = pair.link(plan[0])
    session = await pair.session(link)
    await pair.heard.until("ready")
    monkeypatch.setattr(session.place, "load", lambda *_: asyncio.Event().wait())
    loading = asyncio.create_task(link.load(second[:1]))
    await session.leave()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(LinkEndedError):
            await loading
    assert link.state == "draining"


async def test_worker_that_leaves_while_it_loads_a_version_is_no_faulty_one(
    pair: Pair, plan: tuple[StagePlan, ...], second: tuple[StagePlan, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = pair.link(plan[0])
    session = await pair.session(link)
    await pair.heard.until("ready")
    proceed, load = asyncio.Event(), session.place.load

    async def load_later(*args: Any) -> object:
        await proceed.wait()
        return await load(*args)

    monkeypatch.setattr(session.place, "load", load_later)
    loading = asyncio.create_task(link.load(second[:1]))
    await session.leave()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(LinkEndedError):
            await loading
        proceed.set()
        while not session.place.holds(2, 0):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
    await answered(pair, link, 7, 1)  # behind what it says of the version
    assert link.state == "draining"


@pytest.mark.parametrize("tuning", [Tuning(optimize="eager"), Tuning("bfloat16", "eager"), Tuning("auto", "auto")])
async def test_link_serves_when_its_worker_computes_another_way(pair: Pair, tuning: Tuning) -> None:
    plan = make_plan(load_model("resnet18", "random:0", image_size=IMAGE_SIZE), 2, tuning)
    link = pair.link(*plan, slot=Slot(None, 0))
    await pair.session(link)
    await pair.heard.until("ready")


async def test_link_never_serves_when_the_canary_is_wrong_and_precision_was_left_to_the_worker(pair: Pair) -> None:
    plan = make_plan(load_model("resnet18", "random:0", image_size=IMAGE_SIZE), 2, Tuning("auto", "auto"))
    weights = safetensors.torch.load(plan[1].weights)
    weights["fc.bias"] = weights["fc.bias"] + torch.linspace(-5, 5, len(weights["fc.bias"]))
    link = pair.link(dataclasses.replace(plan[1], weights=safetensors.torch.save(weights)))
    await pair.session(link)
    await pair.heard.until("broken")
    assert link.cause == "error"
    assert "canary" in link.detail
