"""The rendezvous server of elastic worlds: a process outside the worlds that decides the members of each view.

    async with ElasticRendezvous(port=29600, initial_members=4, state_file=Path("elastic.json")) as rendezvous:
        await rendezvous.serve()

or `python -m multiworld.elastic --port 29600 --initial-members 4 --state-file elastic.json`. The decisions are made by
multiworld/elastic/protocol/coordinator.py. No tensor passes through this process. The worlds need it only when their membership
changes. With a `state_file` it can be killed and restarted at any time.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from multiworld.elastic.protocol.coordinator import Action, Coordinator, Disconnect, Persist, SendTo
from multiworld.elastic.protocol.messages import MemberInfo, MessageError, View, parse_member
from multiworld.elastic.rendezvous_link import RendezvousLink, link_name
from multiworld.elastic.state_file import StateFile
from multiworld.errors import WorldError
from multiworld.manager import WorldManager
from multiworld.texts import MAX_NAME_CHARS, is_name, shown

logger = logging.getLogger(__name__)

DEFAULT_PORT = 29600
_CONNECT_TIMEOUT_S = 10.0
"""Seconds that an accepted member may take to connect."""
_FLUSH_TIMEOUT_S = 1.0
"""Seconds that closing a link waits until the queued messages are sent."""
_SAVE_TIMEOUT_S = 5.0
"""Seconds to wait for the disk. After that a decision is sent although it is not stored."""
_MAX_WORLDS = 10_000
"""Maximum number of worlds, empty ones included. A new world replaces the one that has been empty for the longest time."""


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
        state_file: Path | None = None,
        secret: bytes | str = b"",
        heartbeat_interval_s: float = 0.2,
        heartbeat_timeout_s: float = 1.0,
    ) -> None:
        self.addr = addr
        self.port = port
        self._initial_members = initial_members
        self._regroup_timeout_s = regroup_timeout_s
        self._state = StateFile(state_file, _SAVE_TIMEOUT_S)
        self._order: dict[str, asyncio.Lock] = {}  # decisions of a world are sent in the order in which they were made
        self._manager = WorldManager(
            secret=secret, heartbeat_interval_s=heartbeat_interval_s, heartbeat_timeout_s=heartbeat_timeout_s
        )
        self._coordinators: dict[str, Coordinator] = {}
        self._empty: dict[str, None] = {}  # ordered set: the world that became empty first comes first
        self._last_removed_view = 0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._links: dict[tuple[str, str], RendezvousLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def __aenter__(self) -> "ElasticRendezvous":
        """Load the state and listen. Raises OSError when it cannot listen or read the file, ValueError for an invalid state file."""
        for name, view in self._state.load().items():
            self._coordinators[name] = self._make_coordinator(view)
            self._update_timer(name)
        self.port = self._manager.listen(self.addr, self.port)
        self._manager.answer(self.addr, self.port, self._reply)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing = True  # the links that end now must not count as lost members
        for timer in self._timers.values():
            timer.cancel()
        for link in list(self._links.values()):
            await link.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._state.close()
        await self._manager.aclose()

    async def serve(self) -> None:
        """Run until cancelled."""
        await asyncio.get_running_loop().create_future()

    def view(self, world_name: str) -> View:
        """Return the current view of that world. Its number is 0 before the first view."""
        coordinator = self._coordinators.get(world_name)
        return coordinator.view if coordinator else View(0, ())

    def connected(self, world_name: str) -> int:
        """Return the number of connected members, new ones included, of that world."""
        return sum(name == world_name for name, _ in self._links)

    def waiting(self, world_name: str) -> int:
        """Return the number of new members that wait until the members of that world are at a boundary."""
        coordinator = self._coordinators.get(world_name)
        return coordinator.waiting if coordinator else 0

    # -- members that join ---------------------------------------------------------------------------------------------

    async def _reply(self, request: str, host: str) -> bytes:
        """Answer a member that wants to join: the name of the two-member world for its link, or the reason of the rejection."""
        try:
            fields = json.loads(request)
            name, member, resume = str(fields["elastic"]), parse_member(fields["member"]), fields["resume"] is True
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("invalid join request from %s: %s", host, shown(repr(error), 200))
            return json.dumps({"refused": "not a join request of an elastic world"}).encode()
        rejection = self._refusal(name, member.id, resume)
        if rejection is not None:
            return json.dumps(rejection).encode()
        link = self._links[name, member.id] = RendezvousLink(self._manager, link_name(name, member.id), 0)
        self._spawn(self._serve_member(name, member, link, self._coordinator(name)))
        return json.dumps({"link": link.name}).encode()

    def _refusal(self, name: str, member_id: str, resume: bool) -> dict[str, str] | None:
        """Return why a member cannot join: for now (`retry`), because it was evicted (`evicted`), or for good (`refused`); else None."""
        if not is_name(name):
            expected = f"1 to {MAX_NAME_CHARS} printable ASCII characters without spaces"
            return {"refused": f"the name of the world is {name!r:.60}; expected {expected}"}
        coordinator = self._coordinators.get(name)
        if self._closing or (name, member_id) in self._links:
            return {"retry": "the server is shutting down" if self._closing else "this member is connected already"}
        if coordinator is None and len(self._coordinators) >= _MAX_WORLDS and not self._empty:
            return {"refused": "too many worlds"}
        if resume and (coordinator is None or not coordinator.view.number):
            return {"refused": f"this rendezvous server knows no world {name!r}"}
        if resume and coordinator is not None and not coordinator.may_resume(member_id):
            return {"evicted": f"view {coordinator.view.number} does not include this member"}
        return None

    async def _serve_member(
        self, name: str, member: MemberInfo, link: RendezvousLink, coordinator: Coordinator
    ) -> None:
        """Serve the link of one member until the link ends."""
        now_s = asyncio.get_running_loop().time
        try:
            await link.open(self.addr, self.port, _CONNECT_TIMEOUT_S)
            logger.info("world=%s member=%s connected", name, member.id)
            await self._perform(name, coordinator.on_join(member, now_s()))
            while True:
                await self._perform(name, coordinator.on_message(member.id, await link.receive(), now_s()))
        except (WorldError, OSError, MessageError) as error:
            logger.info("world=%s member=%s disconnected: %s", name, member.id, error)
        finally:
            del self._links[name, member.id]
            await link.close()
            if not self._closing:
                await self._perform(name, coordinator.on_lost(member.id, now_s()))

    # -- actions of the coordinators -----------------------------------------------------------------------------------

    async def _perform(self, name: str, actions: Sequence[Action]) -> None:
        """Save the views, then send the messages. Decisions are sent in the order in which they were made.

        It waits for the save, so a member that sends messages faster than the disk can save them is slowed down. Messages of other worlds,
        and decisions that are not stored, do not wait.
        """
        self._update_timer(name)
        for action in actions:
            if isinstance(action, Persist):
                logger.info("world=%s view=%d members=%s", name, action.view.number, ",".join(action.view.ids()))
                self._state.store(name, action.view)
        async with self._order.setdefault(name, asyncio.Lock()):
            try:
                if any(isinstance(action, Persist) for action in actions):
                    await self._state.flush()
            except (OSError, RuntimeError) as error:
                # The decision is sent all the same. A restart before the next successful write loses it.
                logger.error("the state file cannot be written: %s", error)  # noqa: TRY400
            for action in actions:
                match action:
                    case SendTo(member_id, message):
                        if link := self._links.get((name, member_id)):
                            link.send(message)
                    case Disconnect(member_id):
                        if link := self._links.get((name, member_id)):
                            self._spawn(link.close(_FLUSH_TIMEOUT_S))

    def _update_timer(self, name: str) -> None:
        """Set the timer of that world to its next deadline, and mark the world as empty if it has no members."""
        coordinator = self._coordinators[name]
        if timer := self._timers.pop(name, None):
            timer.cancel()
        if coordinator.deadline_s is not None:
            self._timers[name] = asyncio.get_running_loop().call_at(
                coordinator.deadline_s, lambda: self._spawn(self._tick(name))
            )
        if coordinator.empty and not self.connected(name):
            self._empty.setdefault(name)

    async def _tick(self, name: str) -> None:
        if coordinator := self._coordinators.get(name):
            await self._perform(name, coordinator.on_tick(asyncio.get_running_loop().time()))

    def _coordinator(self, name: str) -> Coordinator:
        """Return the coordinator of that world. If the world is new and there are too many, remove an empty one."""
        if name not in self._coordinators:
            if len(self._coordinators) >= _MAX_WORLDS:
                self._remove_world(next(iter(self._empty)))
            # Start after the view numbers of removed worlds, so that an old view cannot be mistaken for one of the new world.
            self._coordinators[name] = self._make_coordinator(View(self._last_removed_view, ()))
        self._empty.pop(name, None)
        return self._coordinators[name]

    def _make_coordinator(self, view: View) -> Coordinator:
        return Coordinator(
            initial_members=self._initial_members,
            regroup_timeout_s=self._regroup_timeout_s,
            view=view,
            now_s=asyncio.get_running_loop().time(),
        )

    def _remove_world(self, name: str) -> None:
        self._last_removed_view = max(self._last_removed_view, self._coordinators.pop(name).view.number)
        del self._empty[name]
        self._order.pop(name, None)
        if timer := self._timers.pop(name, None):
            timer.cancel()
        self._state.remove(name)

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
