"""Protocol between a leader and its workers and frontends: joining (`join`), and the messages over their world (`message`, `channel`,
`inputs`)."""

from multiworld_serving.common.wire.channel import Channel
from multiworld_serving.common.wire.inputs import (
    ALL_ROWS,
    MAX_FETCH_ROWS,
    MAX_INPUTS_HEAD_BYTES,
    MAX_RELEASED,
    BatchInputs,
    LostInput,
    RowRef,
    Source,
    row_refs,
    row_refs_tensor,
)
from multiworld_serving.common.wire.join import (
    FRONTEND_PROTOCOL,
    RELEASE,
    WORKER_PROTOCOL,
    WORLD_BACKEND,
    EdgeJoinRequest,
    FrontendJoinRequest,
    JoinOffer,
    JoinRequest,
    StageAssignment,
    different_fields,
)
from multiworld_serving.common.wire.message import HEADER_BYTES, Header, Message, MessageKind, WireError
from multiworld_serving.common.wire.tracing import MAX_TRACE_BYTES, TraceContext, trace_contexts, trace_message

__all__ = [
    "ALL_ROWS",
    "FRONTEND_PROTOCOL",
    "HEADER_BYTES",
    "MAX_FETCH_ROWS",
    "MAX_INPUTS_HEAD_BYTES",
    "MAX_RELEASED",
    "MAX_TRACE_BYTES",
    "RELEASE",
    "WORKER_PROTOCOL",
    "WORLD_BACKEND",
    "BatchInputs",
    "Channel",
    "EdgeJoinRequest",
    "FrontendJoinRequest",
    "Header",
    "JoinOffer",
    "JoinRequest",
    "LostInput",
    "Message",
    "MessageKind",
    "RowRef",
    "Source",
    "StageAssignment",
    "TraceContext",
    "WireError",
    "different_fields",
    "row_refs",
    "row_refs_tensor",
    "trace_contexts",
    "trace_message",
]
