"""False results that a lying worker sends: each is the list of tensors that go over the link."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from multiworld import World
from multiworld.ops.p2p import send_message
from multiworld_serving.common.wire.channel import Channel
from multiworld_serving.common.wire.message import _CODES, _LAYOUT, _MAGIC, Message, MessageKind

FIRST_BATCH = 1
"""The self-test, batch 0, is answered truly."""


class RawMessage(NamedTuple):
    """A message whose header and size need not agree with its payload."""

    header: bytes
    payload: Tensor | None
    size_bytes: int

    async def send(self, world: World, dst: int) -> None:
        plan = send_message(world.facts, self.header, self.payload, dst, 0)
        plan.size_bytes = self.size_bytes
        await world.start(plan)


def raw_header(
    kind: MessageKind, batch: int, dtype: torch.dtype, shape: Sequence[int], *, compute_ns: int = 0
) -> bytes:
    """A header with this content, true or not."""
    dims = (*shape, *(0,) * (4 - len(shape)))
    return _LAYOUT.pack(_MAGIC, kind, _CODES[dtype] << 4 | len(shape), 0, batch, compute_ns, 0, 1, *dims)


def claim(kind: MessageKind, batch: int, dtype: torch.dtype, shape: Sequence[int], size_bytes: int) -> RawMessage:
    """The head of a message without the payload that it announces."""
    return RawMessage(raw_header(kind, batch, dtype, shape), None, size_bytes)


def _claim(batch: int, shape: Sequence[int], size: int) -> list[RawMessage]:
    return [claim(MessageKind.RESULT, batch, torch.float32, shape, size)]


def whole(message: Message) -> RawMessage:
    """The message without any lie."""
    return RawMessage(message.header(), message.payload, 0 if message.payload is None else message.payload.nbytes)


def _whole(message: Message) -> list[RawMessage]:
    return [whole(message)]


def _result(batch: int, payload: Tensor | None) -> list[RawMessage]:
    return _whole(Message(MessageKind.RESULT, batch, payload))


Lie = Callable[[int, Tensor], list[RawMessage]]
"""Computes the false result from a batch and its correct output."""

LIES: dict[str, Lie] = {
    "huge": lambda batch, output: _claim(batch, (6 << 20, 256), 6 << 30),
    "no-payload": lambda batch, output: _result(batch, None),
    "other-dtype": lambda batch, output: _result(batch, output.double()),
    "more-rows": lambda batch, output: _result(batch, torch.cat((output, output[:1]))),
    "other-batch": lambda batch, output: _result(batch + 1000, output),
    "twice": lambda batch, output: _result(batch, output) * 2,
    "failed-other-batch": lambda batch, output: _whole(Message.from_text(MessageKind.FAILED, "no", batch=batch + 1000)),
    "failed-at-length": lambda batch, output: _whole(
        Message.from_text(MessageKind.FAILED, "x" * (40 << 20), batch=batch)
    ),
    "not-text": lambda batch, output: _whole(Message(MessageKind.FAILED, batch, output)),
    "leader's": lambda batch, output: _whole(Message(MessageKind.BATCH, batch, output)),
    "garbage": lambda batch, output: [RawMessage(bytes([7]) * 48, None, 0)],
}
"""Each of these breaks the link."""


def lying(lie: str) -> Callable[[Channel, Message], "asyncio.Future[None]"]:
    """Replaces `Channel.send` at a worker."""
    send = Channel.send

    async def sent(self: Channel, message: Message) -> None:
        if message.kind is not MessageKind.RESULT or message.batch < FIRST_BATCH:
            await send(self, message)
            return
        assert message.payload is not None
        messages = LIES[lie](message.batch, message.payload)
        await asyncio.gather(*(each.send(self.world, 0) for each in messages))

    return sent  # type: ignore[return-value]
