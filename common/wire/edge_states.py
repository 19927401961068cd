"""The edges on which a process fetches, as it reports them to its leaders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

from multiworld.texts import is_name
from multiworld_serving.common.wire.join import MAX_HOLDER_CHARS
from multiworld_serving.common.wire.message import WireError

MAX_EDGE_STATES = 16
"""Most edges that one process reports."""
EdgeTransport = Literal["shared_memory", "tcp"]


class EdgeState(NamedTuple):
    """One open edge."""

    holder: str
    """The producer: HOST:PORT/INCARNATION."""
    transport: EdgeTransport
    received_bytes: int
    fetch_s: float
    """Mean time of recent transfers, without the wait for earlier ones."""


def edge_states_json(states: Sequence[EdgeState]) -> str:
    """Encode the report of a process."""
    return json.dumps(states)


def parse_edge_states(text: str) -> tuple[EdgeState, ...]:
    """The inverse of `edge_states_json`. Raises WireError if it is invalid."""
    try:
        found = json.loads(text)
        if len(found) > MAX_EDGE_STATES:
            raise ValueError(f"{len(found)} edges; expected at most {MAX_EDGE_STATES}")
        return tuple(_state(*each) for each in found)
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"not a report of edges: {str(error)[:100]}") from error


def _state(holder: Any, transport: Any, received_bytes: Any, fetch_s: Any) -> EdgeState:
    valid = isinstance(holder, str) and is_name(holder, MAX_HOLDER_CHARS) and transport in get_args(EdgeTransport)
    if not valid or type(received_bytes) is not int or not 0 <= received_bytes < 1 << 63:
        raise ValueError("a field is invalid")
    seconds = float(fetch_s)
    if not 0 <= seconds < 1e6:
        raise ValueError("a time is invalid")
    return EdgeState(holder, transport, received_bytes, seconds)
