"""A link releases the outputs that its worker keeps, and takes each result of a batch once."""

import asyncio

import pytest
import torch

from multiworld_serving.common.wire.message import Header, Message, MessageKind, WireError
from multiworld_serving.server.replicas import released_outputs
from multiworld_serving.server.replicas.released_outputs import ReleasedOutputs
from multiworld_serving.server.replicas.reply_validator import ReplyValidator
from tests.resnets import resnet_plan
from tests.waiting import until


async def test_outputs_are_released_after_a_while_when_no_batch_takes_them_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(released_outputs, "_MAX_WAIT_S", 0.0)
    posted: list[Message] = []
    released = ReleasedOutputs(posted.append)
    for number in (1, 2):
        released.add(number)
        await until(lambda number=number: len(posted) == number)  # type: ignore[misc]
    assert [each.payload.tolist() for each in posted if each.payload is not None] == [[1], [2]]
    released.add(3)
    assert released.take() == (3,)
    await asyncio.sleep(0)
    assert len(posted) == 2


@pytest.mark.parametrize("kind", [MessageKind.KEPT, MessageKind.RESULT])
def test_second_result_of_a_batch_is_refused(kind: MessageKind) -> None:
    validator, plan = ReplyValidator(), resnet_plan("random:0", 2, image_size=32)[0]
    validator.stage_loaded(plan)
    validator.batch_sent(1, 1, plan.number, plan.spec.index, fetched=True, keeps=True)
    rows = torch.zeros(1, *plan.output_shape.dims, dtype=plan.output_dtype)
    place = torch.tensor([7, *plan.output_shape.dims])
    sent = place if kind is MessageKind.KEPT else rows
    message = Message(kind, 1, sent, stage=plan.spec.index, version=plan.number)
    header = Header.parse(message.header(), sent.nbytes)
    validator.check(header)
    validator.received(message)
    with pytest.raises(WireError):
        validator.check(header)
