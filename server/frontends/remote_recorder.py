"""Sends the start and outcome of a frontend's requests, and its connections, to the leader, which records them."""

from __future__ import annotations

import itertools

from multiworld_serving.server.frontends.frames import FrameConnection, FrameKind
from multiworld_serving.server.frontends.messages import outcome_fields
from multiworld_serving.server.observability.metrics import InferenceProtocol
from multiworld_serving.server.observability.request_recorder import RequestOutcome


class RemoteRequestRecorder:
    """Implements `multiworld_serving.server.observability.request_recorder.RequestRecorder`."""

    def __init__(self, link: FrameConnection) -> None:
        self._connection = link
        self._numbers = itertools.count(1)

    def request_started(self, protocol: InferenceProtocol) -> int:
        """See `RequestRecorder`."""
        number = next(self._numbers)
        self._connection.send(FrameKind.REQUEST_STARTED, number, {"protocol": protocol})
        return number

    def request_ended(self, number: int, outcome: RequestOutcome) -> None:
        """See `RequestRecorder`."""
        self._connection.send(FrameKind.REQUEST_ENDED, number, outcome_fields(outcome))

    def connections(self, count: int) -> None:
        """Send the number of open connections."""
        self._connection.send(FrameKind.CONNECTION_COUNT, fields={"count": count})

    def connection_closed(self, reason: str) -> None:
        """Send that a connection was closed because of its client."""
        self._connection.send(FrameKind.CONNECTION_CLOSED, fields={"reason": reason})
