"""A link releases the outputs that its worker keeps, and takes each result of a batch once."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from multiworld_serving.common.wire.inputs import BatchInputs
from multiworld_serving.common.wire.join import JoinRequest
from multiworld_serving.common.wire.link import Link
from multiworld_serving.common.wire.protocol import Body, Kind, Received, WireError
from multiworld_serving.common.wire.work import Batch, Computed, Release, Restart
from multiworld_serving.models.bundle.files import read_bundle
from multiworld_serving.server.leader.replicas import worker_link
from multiworld_serving.server.leader.replicas.worker import SentBatch, SlotId, Worker
from multiworld_serving.server.leader.replicas.worker_link import WorkerLink
from multiworld_serving.server.leader.versions.stage_plan import BundlePlan, make_bundle_plan
from tests.bundles import PREVIEW
from tests.waiting import until

PLAN = make_bundle_plan(read_bundle(PREVIEW), 2)[0]
DIMS = PLAN.spec.output_rows.dims


class Posted:
    """A link that only takes messages."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.takes: list[Callable[[Received], object]] = []

    def send(self, body: Any) -> None:
        self.bodies.append(body)

    def ask(self, body: Any, _payload: memoryview, take: Callable[[Received], object]) -> None:
        self.bodies.append(body)
        self.takes.append(take)


def ready_link(*plans: BundlePlan) -> tuple[WorkerLink, Posted, list[Any]]:
    """A link, what it sends, and the outputs that it has taken."""
    worker = Worker(JoinRequest("w", "cpu", "here", 1), SlotId(0, 0), 1, state="ready")
    outputs: list[Any] = []
    posted = Posted()
    link = WorkerLink(worker, plans, lambda _: None, lambda *found: outputs.append(found[3]))
    link._link = cast(Link, posted)
    return link, posted, outputs


async def test_outputs_are_released_after_a_while_when_no_batch_takes_them_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_link, "_RELEASE_S", 0.0)
    link, posted, _ = ready_link()
    for number in (1, 2):
        link.release(number)
        await until(lambda number=number: len(posted.bodies) == number)  # type: ignore[misc]
    assert posted.bodies == [Release((1,)), Release((2,))]
    link.release(3)
    link.send(SentBatch(1, 0, 1, (0,), "r", 0.0), BatchInputs(1, (), torch.zeros(1, 3), (0,)))
    assert posted.bodies[2] == Release((3,))
    assert isinstance(posted.bodies[3], Batch)
    await asyncio.sleep(0)
    assert len(posted.bodies) == 4


@pytest.mark.parametrize(
    ("lie", "keep", "loaded"),
    [
        (Computed(1, 1, (*DIMS, 2), 5), True, True),
        (Computed(1, 1, DIMS, 5), False, True),
        (Computed(1, 1, (*DIMS, 2)), True, True),
        (Computed(1, 1, DIMS), True, True),
        (Restart(), True, True),
        (Computed(1, 1, DIMS, 5), True, False),
    ],
    ids=["kept with other rows", "kept and not asked for", "other rows", "too few bytes", "other message", "unloaded"],
)
def test_output_is_refused_when_it_does_not_match_its_batch(lie: Body, keep: bool, loaded: bool) -> None:
    link, posted, outputs = ready_link(PLAN)
    link.send(SentBatch(1, 0, PLAN.number, (0,), "r", 0.0), BatchInputs(1, (), None, (), keep=keep))
    if not loaded:
        link.unload(PLAN.number)
    size = PLAN.output_dtype.itemsize * DIMS[0]
    with pytest.raises(WireError):
        posted.takes[0](Received(Kind.REPLY, 1, lie, memoryview(bytearray(size - 1))))
    assert not outputs
