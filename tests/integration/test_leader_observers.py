"""A leader with a worker in one process: failing observers do not affect anything else."""

import asyncio
import time

import pytest
import torch
from pydantic import SecretStr

from multiworld import WorldManager, ask
from multiworld_serving.common.tracing import Tracing
from multiworld_serving.common.wire import WORLD_BACKEND, JoinOffer, JoinRequest
from multiworld_serving.server.leader import Leader
from multiworld_serving.server.observability.leader_metrics import LeaderMetrics
from multiworld_serving.server.observability.request_traces import current_span, remote_span
from multiworld_serving.server.pipeline.batch_traces import BatchTraces
from multiworld_serving.server.settings import ServeSettings
from multiworld_serving.workers.compute.engine import Engine
from multiworld_serving.workers.session import Session
from tests.cut_bundles import version_of
from tests.resnets import resnet_plan

WAIT_S = 60.0
SECRET = "a-secret-of-this-test"
IMAGE = torch.zeros(3, 32, 32, dtype=torch.uint8)


class FailingTracer:
    """Cannot start a span."""

    def start_span(self, *_: object, **__: object) -> None:
        raise BrokenPipeError("no span")


def failing_listener(_: object) -> None:
    raise BrokenPipeError("nobody listens")


async def test_leader_serves_when_every_observer_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = version_of(resnet_plan("random:0", 1, image_size=32))
    settings = ServeSettings(token=SecretStr(SECRET), join_port=0, stages=1, replicas=1)
    traces = BatchTraces(Tracing(FailingTracer(), None))
    engine = Engine(torch.device("cpu"))
    async with (
        asyncio.timeout(WAIT_S),
        Leader("resnet18", plan, settings, LeaderMetrics(), traces=traces, on_change=failing_listener) as leader,
        WorldManager(secret=SECRET.encode(), verify_collectives=False) as manager,
    ):
        question = JoinRequest("w", "cpu", "here", 1).to_json()
        offer = JoinOffer.from_json(await ask("127.0.0.1", leader.join_port, question, secret=SECRET.encode()))
        world = await manager.initialize_world(
            offer.world, 1, 2, WORLD_BACKEND, addr="127.0.0.1", port=leader.join_port, generation=offer.generation
        )
        serving = asyncio.create_task(Session(world, engine).run())
        while not leader.ready:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
        current_span.set(remote_span(1, 2))
        for number in range(3):
            answer = await leader.begin(IMAGE, deadline_s=time.monotonic() + WAIT_S, request_id=str(number))
            assert answer.output.shape == (1000,)
        (replica,) = leader.snapshot().stages[0].replicas
        assert (replica.state, replica.generation, replica.batches_done) == ("ready", 1, 3)
        await leader.drain(WAIT_S)
    await asyncio.gather(serving, return_exceptions=True)
    engine.close()
    told = [record.getMessage().partition(" failed;")[0] for record in caplog.records if record.exc_info]
    assert sorted(told) == ["BatchTraces.sent", "failing_listener"], "each is logged once"
