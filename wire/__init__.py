"""What leader and worker say to each other: the questions of joining, and the messages over their world. No logic of either."""

from wire.channel import Channel
from wire.joining import WORLD_BACKEND, JoinOffer, JoinRequest, StageOrder
from wire.message import HEADER_BYTES, Kind, Message, WireError
from wire.tracing import TraceContext, trace_contexts, trace_message

__all__ = [
    "HEADER_BYTES",
    "WORLD_BACKEND",
    "Channel",
    "JoinOffer",
    "JoinRequest",
    "Kind",
    "Message",
    "StageOrder",
    "TraceContext",
    "WireError",
    "trace_contexts",
    "trace_message",
]
