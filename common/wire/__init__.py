"""Protocol between leader and worker: the join request and offer (`join`), and the messages over their world (`message`, `channel`)."""

from multiworld_serving.common.wire.channel import Channel
from multiworld_serving.common.wire.join import (
    MAX_PARTS,
    WORLD_BACKEND,
    FrontendJoinRequest,
    JoinOffer,
    JoinRequest,
    StageAssignment,
)
from multiworld_serving.common.wire.message import HEADER_BYTES, Header, Message, MessageKind, WireError
from multiworld_serving.common.wire.tracing import MAX_TRACE_BYTES, TraceContext, trace_contexts, trace_message

__all__ = [
    "HEADER_BYTES",
    "MAX_PARTS",
    "MAX_TRACE_BYTES",
    "WORLD_BACKEND",
    "Channel",
    "FrontendJoinRequest",
    "Header",
    "JoinOffer",
    "JoinRequest",
    "Message",
    "MessageKind",
    "StageAssignment",
    "TraceContext",
    "WireError",
    "trace_contexts",
    "trace_message",
]
