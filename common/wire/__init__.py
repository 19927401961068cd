"""Protocol between a leader and its workers and frontends: joining (`join`), and the messages over their world (`message`, `channel`)."""

from multiworld_serving.common.wire.channel import Channel
from multiworld_serving.common.wire.join import (
    FRONTEND_PROTOCOL,
    MAX_PARTS,
    RELEASE,
    WORKER_PROTOCOL,
    WORLD_BACKEND,
    FrontendJoinRequest,
    JoinOffer,
    JoinRequest,
    StageAssignment,
    different_fields,
)
from multiworld_serving.common.wire.message import HEADER_BYTES, Header, Message, MessageKind, WireError
from multiworld_serving.common.wire.tracing import MAX_TRACE_BYTES, TraceContext, trace_contexts, trace_message

__all__ = [
    "FRONTEND_PROTOCOL",
    "HEADER_BYTES",
    "MAX_PARTS",
    "MAX_TRACE_BYTES",
    "RELEASE",
    "WORKER_PROTOCOL",
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
    "different_fields",
    "trace_contexts",
    "trace_message",
]
