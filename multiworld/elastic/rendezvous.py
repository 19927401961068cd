"""The rendezvous server of elastic worlds: a process outside the worlds that decides the members of each view.

    async with ElasticRendezvous(port=29600, initial_members=4, state_file=Path("elastic.json")) as rendezvous:
        await rendezvous.serve()

or `python -m multiworld.elastic --port 29600 --initial-members 4 --state-file elastic.json`. The decisions are made by
multiworld/elastic/protocol/coordinator.py. No tensor passes through this process. The worlds need it only when their membership
changes. With a `state_file` it can be killed and restarted at any time.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from multiworld.config import HEARTBEAT_TIMEOUT_S
from multiworld.elastic.protocol import messages
from multiworld.elastic.protocol.coordinator import Action, Coordinator, Persist, SendTo
from multiworld.elastic.rendezvous_link import RendezvousLink
from multiworld.elastic.state_file import StateFile
from multiworld.errors import AskError, WorldError
from multiworld.manager import WorldManager
from multiworld.texts import one_line

logger = logging.getLogger(__name__)

DEFAULT_PORT = 29600
_CONNECT_TIMEOUT_S = 10.0
"""Seconds that an accepted member may take to connect."""
_SAVE_TIMEOUT_S = 5.0
"""Seconds to wait for the disk. After that a decision is sent although it is not stored."""


@dataclass(slots=True, eq=False)
class _World:
    """An elastic world, until it is empty.

    Attributes:
        links: by id of the member; None while the member connects.
        order: decisions are sent in the order in which they were made.
        timer: calls the coordinator at its next deadline.
    """

    name: str
    coordinator: Coordinator
    links: dict[str, RendezvousLink | None] = field(default_factory=dict)
    order: asyncio.Lock = field(default_factory=asyncio.Lock)
    timer: asyncio.TimerHandle | None = None


class ElasticRendezvous:
    """Decides the membership of any number of elastic worlds. Use it with `async with`. The constructor starts nothing.

    Args:
        addr, port: address to listen at; with port 0 the system chooses a free port, and the attribute `port` holds it.
        initial_members: number of members with which the first view of a world starts.
        regroup_timeout_s: seconds within which a connected member must ask for the next view after its view has ended, or it is evicted. A
            member whose event loop is blocked for longer cannot ask.
        state_file: file that stores the views for a restart. With None the views are lost when the process ends, and a world that
            breaks after that cannot form again.
        secret: members must have the same secret. If it is empty, there is no authentication.
        heartbeat_interval_s: seconds between two heartbeats.
        heartbeat_timeout_s: seconds without a heartbeat after which a member counts as lost.
    """

    def __init__(
        self,
        *,
        addr: str = "127.0.0.1",
        port: int = 0,
        initial_members: int = 1,
        regroup_timeout_s: float = 10.0,
        state_file: str | Path | None = None,
        secret: bytes | str = b"",
        heartbeat_interval_s: float = 0.2,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    ) -> None:
        self.addr = addr
        self.port = port
        self._initial_members = initial_members
        self._regroup_timeout_s = regroup_timeout_s
        self._state = StateFile(state_file, _SAVE_TIMEOUT_S)
        self._manager = WorldManager(
            secret=secret,
            heartbeat_interval_s=heartbeat_interval_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
            verify_collectives=False,
        )
        self._worlds: dict[str, _World] = {}
        self._last_removed_view = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def __aenter__(self) -> "ElasticRendezvous":
        """Load the state and listen. Raises OSError when it cannot listen or read the file, ValueError for an invalid state file."""
        for name, view in self._state.load().items():
            self._update(self._add_world(name, view))
        self.port = self._manager.listen(self.addr, self.port)
        self._manager.answer(self.addr, self.port, self._reply)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True  # the links that end now must not count as lost members
        for world in self._worlds.values():
            if world.timer is not None:
                world.timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # This also waits for a write in progress, so that it does not overlap with those of the next owner.
        with contextlib.suppress(OSError, RuntimeError):
            await self._save()
        self._state.close()
        await self._manager.aclose()

    async def serve(self) -> None:
        """Run until cancelled."""
        await asyncio.get_running_loop().create_future()

    def view(self, world_name: str) -> messages.View:
        """Return the current view of that world. Its number is 0 if the world has no members."""
        world = self._worlds.get(world_name)
        return world.coordinator.view if world else messages.View(0, ())

    def connected(self, world_name: str) -> int:
        """Return the number of connected members, new ones included, of that world."""
        world = self._worlds.get(world_name)
        return len(world.links) if world else 0

    # -- members that join ---------------------------------------------------------------------------------------------

    async def _reply(self, question: str, host: str) -> bytes:
        """Answer a member that wants to join, and serve its link. Raises AskError if it shall ask again."""
        try:
            join = messages.decode(question)
        except messages.MessageError as error:
            logger.warning("invalid join request from %s: %s", host, one_line(str(error), 200))
            return messages.encode(messages.Refused(one_line(str(error), 200)))
        if not isinstance(join, messages.Join):
            return messages.encode(messages.Refused("not a join request of an elastic world"))
        if rejection := self._rejection(join):
            return messages.encode(rejection)
        # View numbers continue after those of worlds that were removed, so that an old view is not mistaken for a new one.
        world = self._worlds.get(join.world) or self._add_world(join.world, messages.View(self._last_removed_view, ()))
        world.links[join.member.id] = None
        self._spawn(self._serve_member(world, join.member))
        return messages.encode(messages.Admitted())

    def _rejection(self, join: messages.Join) -> messages.Refused | messages.Evicted | None:
        """Return why a member cannot join, None if it can. Raises AskError if it can later."""
        world = self._worlds.get(join.world)
        if self._closing or (world is not None and join.member.id in world.links):
            raise AskError("the server is shutting down" if self._closing else "this member is connected already")
        if join.resume and (world is None or not world.coordinator.view.number):
            return messages.Refused(f"this rendezvous server knows no world {join.world!r}")
        if join.resume and world is not None and not world.coordinator.may_resume(join.member.id):
            return messages.Evicted(f"view {world.coordinator.view.number} does not include this member")
        return None

    async def _serve_member(self, world: _World, member: messages.MemberInfo) -> None:
        """Serve the link of one member until the link ends."""
        coordinator, now_s = world.coordinator, asyncio.get_running_loop().time
        link = None
        try:
            link = world.links[member.id] = await RendezvousLink.open(
                self._manager, world.name, member.id, 0, self.addr, self.port, _CONNECT_TIMEOUT_S
            )
            logger.info("world=%s member=%s connected", world.name, member.id)
            await self._perform(world, coordinator.on_join(member, now_s()))
            while True:
                await self._perform(world, coordinator.on_message(member.id, await link.receive(), now_s()))
        except (WorldError, OSError, messages.MessageError) as error:
            logger.info("world=%s member=%s disconnected: %s", world.name, member.id, error)
        finally:
            del world.links[member.id]
            if link is not None:
                link.close()
            if not self._closing:
                await self._perform(world, coordinator.on_lost(member.id, now_s()))

    # -- actions of the coordinators -----------------------------------------------------------------------------------

    async def _perform(self, world: _World, actions: Sequence[Action]) -> None:
        """Save the views, then send the messages. Decisions are sent in the order in which they were made.

        It waits for the save, so a member that sends messages faster than the disk can save them is slowed down. Messages of other worlds,
        and decisions that are not stored, do not wait.
        """
        for action in actions:
            if isinstance(action, Persist):
                logger.info("world=%s view=%d members=%s", world.name, action.view.number, ",".join(action.view.ids()))
        self._update(world)
        async with world.order:
            try:
                if any(isinstance(action, Persist) for action in actions):
                    await self._save()
            except (OSError, RuntimeError) as error:
                # The decision is sent all the same. A restart before the next successful write loses it.
                logger.error("the state file cannot be written: %s", error)  # noqa: TRY400
            for action in actions:
                if isinstance(action, SendTo) and (link := world.links.get(action.member_id)):
                    link.send(action.message)

    async def _save(self) -> None:
        """Save the views of all worlds. Raises OSError, RuntimeError."""
        views = {name: world.coordinator.view for name, world in self._worlds.items()}
        await self._state.save({name: view for name, view in views.items() if view.members})

    def _update(self, world: _World) -> None:
        """Set the timer of the world to its next deadline. Remove the world if it has no members."""
        coordinator = world.coordinator
        if world.timer is not None:
            world.timer.cancel()
        if coordinator.deadline_s is not None:
            loop = asyncio.get_running_loop()
            world.timer = loop.call_at(coordinator.deadline_s, lambda: self._spawn(self._tick(world)))
        if coordinator.empty and not world.links and self._worlds.get(world.name) is world:
            del self._worlds[world.name]
            self._last_removed_view = max(self._last_removed_view, coordinator.view.number)

    async def _tick(self, world: _World) -> None:
        await self._perform(world, world.coordinator.on_tick(asyncio.get_running_loop().time()))

    def _add_world(self, name: str, view: messages.View) -> _World:
        coordinator = Coordinator(
            initial_members=self._initial_members,
            regroup_timeout_s=self._regroup_timeout_s,
            view=view,
            now_s=asyncio.get_running_loop().time(),
        )
        world = self._worlds[name] = _World(name, coordinator)
        return world

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
