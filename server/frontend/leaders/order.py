"""Which leader of a frontend acts, and which ones get requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

from multiworld_serving.common.service.administration import Desired
from multiworld_serving.common.service.messages import Follow
from multiworld_serving.common.service.predictor import ModelVersion
from multiworld_serving.server.frontend.leaders.link import LeaderLink


class LeaderOrder:
    """
    Attributes:
        links: to all leaders, in their order.
        desired: the version that all leaders should serve: the one with the highest revision that a leader has reported.
        current: the connected leaders that serve `desired`. If no leader serves it, the leaders that failed to load it.
        acting: the first ready leader of `current`. If none is ready, the first one.
        candidates: the leaders that get requests, in this order.
        version: of the acting leader.
    """

    def __init__(self) -> None:
        self.links: list[LeaderLink] = []
        self.desired: Desired | None = None
        self.current: list[LeaderLink] = []
        self.acting: LeaderLink | None = None
        self.candidates: list[LeaderLink] = []
        self.version = ModelVersion(0, "")
        self._was_ready = False
        self._changed = asyncio.Event()

    def update(self) -> None:
        """The state of a leader has changed. Sends what is desired to leaders that do not know it."""
        self._spread_desired()
        self.find_candidates()
        self._changed.set()
        self._changed = asyncio.Event()

    def find_candidates(self) -> None:
        """Update `candidates`: first the ready leaders, then the usable ones."""
        usable = [(link, link.state) for link in self.current if link.state is not None and link.usable]
        if any(state.snapshot.ready for _, state in usable):
            for link, state in usable:
                link.was_ready = state.snapshot.ready
        self._was_ready |= any(link.was_ready for link in self.links)
        if self._was_ready:  # a leader whose workers have not joined yet, or have left it, would reject the requests
            usable = [(link, state) for link, state in usable if link.was_ready]
        usable.sort(key=lambda each: not each[1].snapshot.ready)
        self.candidates = [link for link, _ in usable]

    def _spread_desired(self) -> None:
        connected = [(link, link.state) for link in self.links if link.state is not None]
        known = [state.desired for _, state in connected]
        latest = max(known, key=lambda desired: desired.rank, default=None)
        own = self.desired
        # If they have one rank, a leader has started with other content. The first one counts as long as a leader knows it.
        if latest is not None and (
            own is None or latest.rank > own.rank or (latest.rank == own.rank and own not in known)
        ):
            self.desired = latest
        for link, state in connected:
            if state.desired != self.desired and self.desired is not None:
                link.connected().send(Follow(self.desired))
        able = [(link, state) for link, state in connected if state.served == self.desired]
        unable = [(link, state) for link, state in connected if state.obstacle]
        # If the file of the able leaders was overwritten, they cannot send its weights to new workers. Then the others serve.
        ready = [any(state.snapshot.ready for _, state in each) for each in (able, unable)]
        self.current = [link for link, _ in (unable if not able or ready == [False, True] else able)]
        self.acting = min(
            self.current, key=lambda link: link.state is None or not link.state.snapshot.ready, default=None
        )
        if self.acting is not None and self.acting.state is not None:
            self.version = self.acting.state.served.version

    def choose(self, rejected: Collection[LeaderLink]) -> LeaderLink | None:
        """The first candidate that has not rejected the request. If there is none, an admitted request goes to a leader that drains."""
        for link in self.candidates:
            if link not in rejected:
                return link
        if rejected:
            return None
        return next((link for link in self.links if link.state is not None and link.state.snapshot.draining), None)

    async def wait_for_change(self, until_s: float) -> bool:
        """Wait for a change of a leader's state. Returns whether there was one in time."""
        changed = self._changed
        try:
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                return await changed.wait()
        except TimeoutError:
            return False
