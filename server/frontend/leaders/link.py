"""A frontend's link to one leader: join, exchange messages, and join again after every failure."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
from collections.abc import Sequence
from typing import Protocol

from multiworld import AskError, WorldError, WorldManager
from multiworld_serving.common.config.addresses import Address
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.edges.edges import Edges
from multiworld_serving.common.service.messages import FRONTEND_PROTOCOL, MAX_BYTES, Done, LeaderState, Metrics, Scrape
from multiworld_serving.common.service.predictor import ServedModel
from multiworld_serving.common.service.snapshots import LeaderCondition, LeaderSnapshot
from multiworld_serving.common.settings.serve import FrontendSettings
from multiworld_serving.common.wire.join import FrontendJoinRequest, JoinOffer, log_failure
from multiworld_serving.common.wire.link import Link, LinkLostError
from multiworld_serving.common.wire.protocol import Received, WireError
from multiworld_serving.server.frontend.observability.metrics import FrontendMetrics

logger = logging.getLogger(__name__)

_LEADER_RANK = 0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class LinkOwner(Protocol):
    """What a link uses of the pool that owns it."""

    name: str
    edges: Edges
    metrics: FrontendMetrics

    @property
    def links(self) -> Sequence[LeaderLink]:
        """All links of the pool."""

    def check_model(self, model: ServedModel | None, leader: LeaderLink) -> None:
        """Raise ValueError if this model does not fit."""

    def on_state(self) -> None:
        """Called when the state of a leader has changed."""

    async def wait_idle(self) -> Done:
        """Wait until no request needs a leader that drains. Returns the reply to that leader."""


class LeaderLink:
    """Joins one leader and stays joined while `run` runs.

    Args:
        address: where the leader listens; `settings` may know another one before each attempt to join.
        pool: is told what happens on the link.
        number: position of the leader in `settings.leaders`.

    Attributes:
        state: last state reported by the leader; None while disconnected.
        name: of the leader, as known from its last state.
        was_ready: whether the leader is ready. If no leader is, whether it was ready most recently. False for a new link.
    """

    def __init__(
        self,
        address: Address,
        settings: FrontendSettings,
        pool: LinkOwner,
        number: int = 0,
    ) -> None:
        self.address = address
        self._number = number
        self.state: LeaderState | None = None
        self.name: str | None = None
        self.was_ready = False
        self._settings = settings
        self._pool = pool
        self._link: Link | None = None

    @property
    def label(self) -> str | None:
        """Name of the leader, with its address if another leader has the same name; None if it was never reached."""
        is_unique = all(other is self or other.name != self.name for other in self._pool.links)
        return self.name if self.name is None or is_unique else f"{self.name}@{self.address}"

    @property
    def usable(self) -> bool:
        """Whether requests may be sent: the leader is connected and does not reject everything."""
        return self.state is not None and not (self.state.snapshot.draining or self.state.snapshot.unloaded)

    def snapshot(self) -> LeaderSnapshot:
        """For the status."""
        state = self.state
        if state is None:
            return LeaderSnapshot(str(self.address), "unreachable", self.label)
        pipeline = state.snapshot
        condition: LeaderCondition = (
            "draining" if pipeline.draining else "unloaded" if pipeline.unloaded else "not_ready"
        )
        if condition == "not_ready" and not state.obstacle:
            condition = "ready" if pipeline.ready else "not_ready" if pipeline.has_workers else "standby"
        return LeaderSnapshot(
            str(self.address),
            condition,
            self.label,
            state.host,
            state.pid,
            state.served.version.name,
            pipeline.queue_depth,
            pipeline.requests_in_flight,
            pipeline.uptime_s,
            state.obstacle,
        )

    # -- messages --------------------------------------------------------------------------------------------------------------

    def connected(self) -> Link:
        """The link. Raises LinkLostError while there is none."""
        if self._link is None:
            raise LinkLostError("not connected", failed=False)
        return self._link

    # -- the link --------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Stay joined to the leader until cancelled.

        Raises:
            UserError: the leader rejects the token, and it is the only leader.
        """
        settings, failures = self._settings, 0
        # `verify_collectives` must equal the leader's. Each link has a manager, because two leaders may use the same world name.
        async with WorldManager(secret=settings.secret, verify_collectives=False, **settings.heartbeats) as manager:
            while True:
                try:
                    await self._serve_once(manager)
                    failures = 0
                except PermissionError as error:
                    message = f"the leader at {self.address} rejects this frontend's token: {error}"
                    if (
                        len(settings.leaders) == 1 and not self._pool.name
                    ):  # a leader of one model must not end the others
                        raise UserError(message) from error
                    log_failure(self.address, AskError(message), failures)
                    failures += 1
                except (AskError, WorldError, WireError, OSError) as error:
                    log_failure(self.address, error, failures)
                    failures += 1
                longest_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(failures, 10))
                await asyncio.sleep(longest_s * random.uniform(0.5, 1.0))

    async def _serve_once(self, manager: WorldManager) -> None:
        """Join and stay until the link ends. Raises an error if the leader could not be used."""
        self.address = self._settings.leaders[self._number]
        offer = await self._ask()
        world = await offer.join(manager, self.address, self._settings.join_timeout_s)
        self._link = Link(world, _LEADER_RANK, FRONTEND_PROTOCOL, self._receive, MAX_BYTES)
        try:
            lost = await self._link.run()
            if self.state is None:
                raise WireError(f"the link ended before the leader sent its state: {lost}")
            log = logger.warning if lost.failed else logger.info
            log("leader=%s name=%s the link ended: %s", self.address, self.name, lost)
        finally:
            self._on_lost()
            with contextlib.suppress(WorldError):
                await manager.close_world(world.name)

    async def _ask(self) -> JoinOffer:
        settings = self._settings
        request = FrontendJoinRequest(settings.name, socket.gethostname(), os.getpid(), self._pool.edges.holder)
        return await JoinOffer.ask(
            self.address, request.to_json(), secret=settings.secret, timeout_s=settings.join_timeout_s
        )

    def _receive(self, received: Received) -> None:
        link, number = self._link, received.number
        assert link is not None, "messages come over the link"
        match received.body:
            case LeaderState() as state:
                if self.state is None:
                    self._pool.check_model(state.model, self)
                self.state, self.name = state, state.snapshot.leader
                self.was_ready |= state.snapshot.ready
                self._pool.on_state()
                if number:
                    link.handle(number, self._pool.wait_idle())
            case Scrape():
                link.handle(number, self._scrape())
            case body:
                raise ValueError(f"unexpected {type(body).__name__} from a leader")

    async def _scrape(self) -> Metrics:
        return Metrics((("", (await self._pool.metrics.scrape()).decode()),))

    def _on_lost(self) -> None:
        self._link, self.state, self.was_ready = None, None, False
        self._pool.on_state()
