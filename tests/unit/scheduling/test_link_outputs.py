"""A link releases the outputs that its worker keeps, and takes each result of a batch once."""

import asyncio
from dataclasses import replace
from typing import cast

import pytest
import torch

from multiworld_serving.common.wire.channel import Channel
from multiworld_serving.common.wire.inputs import BatchInputs
from multiworld_serving.common.wire.join import JoinRequest
from multiworld_serving.common.wire.message import Message, MessageKind, WireError
from multiworld_serving.models.bundle.files import read_bundle
from multiworld_serving.server.replicas import worker_link
from multiworld_serving.server.replicas.worker import SentBatch, SlotId, Worker
from multiworld_serving.server.replicas.worker_link import WorkerLink
from multiworld_serving.server.versions.stage_plan import StagePlan
from tests.bundles import PREVIEW
from tests.cut_bundles import bundle_plan
from tests.waiting import until


class Posted:
    """A channel that only takes messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def start(self, message: Message) -> None:
        self.messages.append(message)


def ready_link(*plans: StagePlan) -> tuple[WorkerLink, list[Message]]:
    worker = Worker(JoinRequest("w", "cpu", "here", 1), SlotId(0, 0), 1, state="ready")
    link, posted = WorkerLink(worker, plans, lambda _: None, lambda *_: None), Posted()
    link._channel = cast(Channel, posted)
    return link, posted.messages


async def test_outputs_are_released_after_a_while_when_no_batch_takes_them_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_link, "_RELEASE_S", 0.0)
    link, posted = ready_link()
    for number in (1, 2):
        link.release(number)
        await until(lambda number=number: len(posted) == number)  # type: ignore[misc]
    assert [each.payload.tolist() for each in posted if each.payload is not None] == [[1], [2]]
    link.release(3)
    sent = SentBatch(1, 0, 1, (0,), "r", 0.0)
    link.send(sent, BatchInputs(1, (), torch.zeros(1, 3), (0,)))
    assert sent.inputs is not None
    assert sent.inputs.release == (3,)
    await asyncio.sleep(0)
    assert [each.kind for each in posted[2:]] == [MessageKind.INPUTS]


@pytest.mark.parametrize("kind", [MessageKind.KEPT, MessageKind.RESULT])
def test_result_is_refused_when_its_batch_is_not_in_flight(kind: MessageKind) -> None:
    plan = bundle_plan(read_bundle(PREVIEW), 2)[0]
    link, _ = ready_link(plan)
    rows = torch.zeros(1, *plan.output_shape.dims, dtype=plan.output_dtype)
    place = torch.tensor([7, *plan.output_shape.dims])
    payload = place if kind is MessageKind.KEPT else rows
    message = Message(kind, 1, payload, stage=plan.spec.index, version=plan.number)
    header = Message.parse(message.header(), payload.nbytes)
    with pytest.raises(WireError):
        link._check(header)
    link.send(SentBatch(1, 0, plan.number, (0,), "r", 0.0), BatchInputs(1, (), rows, (0,)))
    link._check(header)
    with pytest.raises(WireError):
        link._check(replace(header, batch=2))
