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
    EDGE_DTYPES,
    MAX_PARTS,
    PROTOCOL,
    RELEASE,
    WORLD_BACKEND,
    EdgeJoinRequest,
    FrontendJoinRequest,
    JoinOffer,
    JoinRequest,
    StageAssignment,
)
from multiworld_serving.common.wire.message import HEADER_BYTES, Header, Message, MessageKind, RowShape, WireError
from multiworld_serving.common.wire.tracing import MAX_TRACE_BYTES, TraceContext, trace_contexts, trace_message

__all__ = [
    "ALL_ROWS",
    "EDGE_DTYPES",
    "HEADER_BYTES",
    "MAX_FETCH_ROWS",
    "MAX_INPUTS_HEAD_BYTES",
    "MAX_PARTS",
    "MAX_RELEASED",
    "MAX_TRACE_BYTES",
    "PROTOCOL",
    "RELEASE",
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
    "RowShape",
    "Source",
    "StageAssignment",
    "TraceContext",
    "WireError",
    "row_refs",
    "row_refs_tensor",
    "trace_contexts",
    "trace_message",
]
