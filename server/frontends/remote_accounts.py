"""The accounts of a frontend's requests and connections, which the leader keeps for all."""

from __future__ import annotations

import itertools

from server.accounts import RequestOutcome
from server.frontends.frames import FrameLink, Kind
from server.frontends.messages import outcome_facts
from server.metrics import Protocol


class RemoteAccounts:
    """Implements `server.accounts.Accounts`."""

    def __init__(self, link: FrameLink) -> None:
        self._link = link
        self._numbers = itertools.count(1)

    def request_began(self, protocol: Protocol) -> int:
        """See `Accounts`."""
        number = next(self._numbers)
        self._link.send(Kind.BEGAN, number, {"protocol": protocol})
        return number

    def request_ended(self, number: int, outcome: RequestOutcome) -> None:
        """See `Accounts`."""
        self._link.send(Kind.ENDED, number, outcome_facts(outcome))

    def connections(self, count: int) -> None:
        """So many connections are open here."""
        self._link.send(Kind.CONNECTIONS, facts={"count": count})

    def connection_closed(self, reason: str) -> None:
        """A connection was closed for what its client did."""
        self._link.send(Kind.CLOSED, facts={"reason": reason})
