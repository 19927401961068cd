"""The edges on which a process fetches, as it reports them to its leaders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from multiworld_serving.common.wire.join import Holder
from multiworld_serving.common.wire.message import WireError

MAX_EDGE_STATES = 16
"""Most edges that one process reports."""
EdgeTransport = Literal["shared_memory", "tcp"]


class EdgeState(NamedTuple):
    """One open edge."""

    holder: Holder
    """The producer: HOST:PORT/INCARNATION."""
    transport: EdgeTransport
    received_bytes: Annotated[int, Meta(ge=0)]
    fetch_s: Annotated[float, Meta(ge=0, lt=1e6)]
    """Mean time of recent transfers, without the wait for earlier ones."""


EdgeStates = Annotated[tuple[EdgeState, ...], Meta(max_length=MAX_EDGE_STATES)]
_DECODER = msgspec.json.Decoder(EdgeStates)


def edge_states_json(states: Sequence[EdgeState]) -> str:
    """Encode the report of a process."""
    return msgspec.json.encode(states).decode()


def parse_edge_states(text: str) -> tuple[EdgeState, ...]:
    """The inverse of `edge_states_json`. Raises WireError if it is invalid."""
    try:
        return _DECODER.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise WireError(f"not a report of edges: {error!s:.100}") from error
