"""False results that a lying worker sends: each is the list of tensors that go over the link."""

import asyncio
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from multiworld_serving.common.wire import Message, MessageKind
from multiworld_serving.common.wire.channel import Channel
from multiworld_serving.common.wire.message import _CODES, _LAYOUT, _MAGIC, bytes_tensor

FIRST_BATCH = 1
"""The result of the join self-test, batch 0, is not changed."""


def raw_header(
    kind: MessageKind, batch: int, dtype: torch.dtype, shape: Sequence[int], size: int, *, compute_ns: int = 0
) -> Tensor:
    """A header with this content, true or not."""
    dims = (*shape, *(0,) * (5 - len(shape)))
    return bytes_tensor(_LAYOUT.pack(_MAGIC, kind, _CODES[dtype], len(shape), 0, batch, size, compute_ns, 0, 1, *dims))


def _claim(batch: int, shape: Sequence[int], size: int) -> list[Tensor]:
    """A header without the data that it announces."""
    return [raw_header(MessageKind.RESULT, batch, torch.float32, shape, size)]


def _whole(message: Message) -> list[Tensor]:
    return [message.header()] if message.payload is None else [message.header(), message.payload]


def _result(batch: int, payload: Tensor | None) -> list[Tensor]:
    return _whole(Message(MessageKind.RESULT, batch, payload))


Lie = Callable[[int, Tensor], list[Tensor]]
"""Computes the false result from a batch and its correct output."""

LIES: dict[str, Lie] = {
    "size-zero": lambda batch, output: _claim(batch, output.shape, 0),
    "huge": lambda batch, output: _claim(batch, (6 << 20, 256), 6 << 30),
    "overflow": lambda batch, output: _claim(batch, (2**32 - 1,) * 5, 2**64 - 4),
    "no-payload": lambda batch, output: _result(batch, None),
    "empty": lambda batch, output: _result(batch, output[:0]),
    "other-dtype": lambda batch, output: _result(batch, output.double()),
    "dtype-of-the-same-size": lambda batch, output: _result(batch, output.view(torch.int32)),
    "flat": lambda batch, output: _result(batch, output.flatten()),
    "one-dimension-more": lambda batch, output: _result(batch, output[..., None]),
    "swapped": lambda batch, output: _result(batch, output.transpose(0, 1).contiguous()),
    "more-rows": lambda batch, output: _result(batch, torch.cat((output, output[:1]))),
    "fewer-rows": lambda batch, output: _result(batch, output[1:]),
    "fewer-columns": lambda batch, output: _result(batch, output[:, 1:].contiguous()),
    "other-batch": lambda batch, output: _result(batch + 1000, output),
    "twice": lambda batch, output: _result(batch, output) * 2,
    "failed-other-batch": lambda batch, output: _whole(Message.from_text(MessageKind.FAILED, "no", batch=batch + 1000)),
    "failed-at-length": lambda batch, output: _whole(
        Message.from_text(MessageKind.FAILED, "x" * (40 << 20), batch=batch)
    ),
    "not-text": lambda batch, output: _whole(Message(MessageKind.FAILED, batch, output)),
    "leader's": lambda batch, output: _whole(Message(MessageKind.BATCH, batch, output)),
    "garbage": lambda batch, output: [torch.full((64,), 7, dtype=torch.uint8)],
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
        tensors = LIES[lie](message.batch, message.payload)
        operations = [self.world.start_send(tensor, 0) for tensor in tensors if tensor.numel()]
        await asyncio.gather(*(self.world.finish(operation) for operation in operations))

    return sent  # type: ignore[return-value]
