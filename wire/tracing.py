"""Whose traces a batch belongs to: the contexts of its requests' spans, which travel in front of the batch. Nothing travels untraced."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wire.message import Kind, Message, WireError, bytes_tensor

_MAX_CONTEXTS = 1024
_CONTEXT = struct.Struct("!16s8s")


class TraceContext(NamedTuple):
    """A span that is recorded, as W3C's Trace Context names it."""

    trace_id: int
    span_id: int


def trace_message(batch: int, contexts: Sequence[TraceContext]) -> Message:
    """What goes in front of a batch of which some requests are traced; of very many, the first ones."""
    packed = b"".join(
        _CONTEXT.pack(context.trace_id.to_bytes(16), context.span_id.to_bytes(8))
        for context in contexts[:_MAX_CONTEXTS]
    )
    return Message(Kind.TRACE, batch, bytes_tensor(packed))


def trace_contexts(payload: Tensor | None) -> list[TraceContext]:
    """What `trace_message` has packed. Raises WireError when it is something else."""
    if payload is None or payload.dtype != torch.uint8 or payload.dim() != 1:
        raise WireError("TRACE: expected bytes")
    size = payload.numel()
    if size % _CONTEXT.size or size > _MAX_CONTEXTS * _CONTEXT.size:
        raise WireError(f"TRACE of {size} bytes")
    found = _CONTEXT.iter_unpack(bytes(payload.numpy()))
    return [TraceContext(int.from_bytes(trace), int.from_bytes(span)) for trace, span in found]
