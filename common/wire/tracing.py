"""Trace contexts of a batch's requests, sent in a TRACE message before the batch. Untraced batches have no such message."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from multiworld_serving.common.wire.message import Message, MessageKind, WireError, bytes_tensor

_MAX_CONTEXTS = 1024
_CONTEXT = struct.Struct("!16s8s")
MAX_TRACE_BYTES = _MAX_CONTEXTS * _CONTEXT.size


class TraceContext(NamedTuple):
    """Ids of a recorded span, as in W3C Trace Context."""

    trace_id: int
    span_id: int


def trace_message(batch: int, contexts: Sequence[TraceContext]) -> Message:
    """The TRACE message for a batch. Keeps the first 1024 contexts."""
    packed = b"".join(
        _CONTEXT.pack(context.trace_id.to_bytes(16), context.span_id.to_bytes(8))
        for context in contexts[:_MAX_CONTEXTS]
    )
    return Message(MessageKind.TRACE, batch, bytes_tensor(packed))


def trace_contexts(payload: Tensor | None) -> list[TraceContext]:
    """Decode the payload of `trace_message`. Raises WireError if it is invalid."""
    if payload is None or payload.dtype != torch.uint8 or payload.dim() != 1:
        raise WireError("TRACE: expected bytes")
    size = payload.numel()
    if size % _CONTEXT.size or size > MAX_TRACE_BYTES:
        raise WireError(f"TRACE of {size} bytes")
    found = _CONTEXT.iter_unpack(bytes(payload.numpy()))
    return [TraceContext(int.from_bytes(trace), int.from_bytes(span)) for trace, span in found]
