"""The rendezvous of elastic worlds: a process outside the worlds that decides the members of each epoch.

    async with ElasticRendezvous(port=29600, first_size=4, state_file=Path("elastic.json")) as rendezvous:
        await rendezvous.serve()

or `python -m multiworld.elastic --port 29600 --first-size 4 --state-file elastic.json`. The decisions are made by
multiworld/elastic/protocol/coordinator.py. No tensor passes through this process. It is idle while the membership does not change, and
the worlds run without it. With a `state_file` it can be killed and restarted at any time.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from multiworld.elastic.protocol import coordinator as decisions
from multiworld.elastic.protocol.coordinator import Coordinator, Drop, Remember, Tell
from multiworld.elastic.protocol.messages import MemberInfo, MessageError, View, seating
from multiworld.elastic.rendezvous_link import Link, link_name
from multiworld.elastic.state_file import StateFile
from multiworld.errors import WorldError
from multiworld.manager import WorldManager
from multiworld.texts import MAX_NAME_CHARS, is_name, shown

logger = logging.getLogger(__name__)

DEFAULT_PORT = 29600
_LINK_S = 10.0
"""Seconds that an accepted member may take to connect."""
_LAST_WORDS_S = 1.0
"""Seconds that closing a link waits until the queued messages are sent."""
_SAVE_S = 5.0
"""Seconds to wait for the disk. After that a decision is sent although it is not saved."""
_MAX_WORLDS = 10_000
"""Maximum number of worlds, empty ones included. A new world replaces the one that has been empty for the longest time."""


class ElasticRendezvous:
    """Decides the membership of any number of elastic worlds. Use it with `async with`. The constructor starts nothing.

    Args:
        addr, port: address to listen at; with port 0 the system chooses a free port, and the attribute `port` holds it.
        first_size: number of members with which the first epoch of a world starts.
        patience_s: seconds that a connected member may take to ask for the next epoch after its epoch is over. Its event loop must
            run within that time, or the member is evicted.
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
        first_size: int = 1,
        patience_s: float = 10.0,
        state_file: Path | None = None,
        secret: bytes | str = b"",
        heartbeat_interval_s: float = 0.2,
        heartbeat_timeout_s: float = 1.0,
    ) -> None:
        self.addr = addr
        self.port = port
        self._first_size = first_size
        self._patience_s = patience_s
        self._state = StateFile(state_file, _SAVE_S)
        self._saving = asyncio.Lock()
        self._manager = WorldManager(
            secret=secret, heartbeat_interval_s=heartbeat_interval_s, heartbeat_timeout_s=heartbeat_timeout_s
        )
        self._coordinators: dict[str, Coordinator] = {}
        self._empty: dict[str, None] = {}  # ordered set: the world that became empty first comes first
        self._forgotten_epoch = 0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def __aenter__(self) -> "ElasticRendezvous":
        """Load the state and listen. Raises OSError when it cannot listen or read the file, ValueError for an invalid state file."""
        for name, view in self._state.load().items():
            self._coordinators[name] = self._make_coordinator(view)
            self._settle(name)
        self.port = self._manager.listen(self.addr, self.port)
        self._manager.answer(self.addr, self.port, self._answer)
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
        """Return the current epoch of that world and its members. The epoch is 0 before the first one."""
        known = self._coordinators.get(world_name)
        return known.view if known else View(0, ())

    def connected(self, world_name: str) -> int:
        """Return the number of connected members and newcomers of that world."""
        return sum(name == world_name for name, _ in self._links)

    def waiting(self, world_name: str) -> int:
        """Return the number of newcomers that wait until the members of that world are at a boundary."""
        known = self._coordinators.get(world_name)
        return known.waiting if known else 0

    # -- members that join ---------------------------------------------------------------------------------------------------

    async def _answer(self, question: str, host: str) -> bytes:
        """Answer a member that wants to join: the name of the two-member world for its link, or the reason of the rejection."""
        try:
            fields = json.loads(question)
            name, member, resume = str(fields["elastic"]), seating(fields["member"]), fields["resume"] is True
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("a question from %s is refused: %s", host, shown(repr(error), 200))
            return json.dumps({"refused": "not a question about an elastic world"}).encode()
        obstacle = _name_obstacle(name) or self._obstacle(name, member.id, resume)
        if obstacle is not None:
            return json.dumps(obstacle).encode()
        link = self._links[name, member.id] = Link(self._manager, link_name(name, member.id), 0)
        self._spawn(self._attend(name, member, link, self._coordinator(name)))
        return json.dumps({"link": link.name}).encode()

    def _obstacle(self, name: str, member_id: str, resume: bool) -> dict[str, str] | None:
        """Return why a member cannot join: for now (`later`), because it was evicted (`evicted`), or for good (`refused`); else None."""
        known = self._coordinators.get(name)
        if self._closing or (name, member_id) in self._links:
            return {"later": "the rendezvous is ending" if self._closing else "connected already"}
        if known is None and len(self._coordinators) >= _MAX_WORLDS and not self._empty:
            return {"refused": "too many worlds"}
        if resume and (known is None or not known.view.epoch):
            return {"refused": f"this rendezvous knows no world {name!r}"}
        if resume and known is not None and not known.may_resume(member_id):
            return {"evicted": f"given up, epoch {known.view.epoch} is current now"}
        return None

    async def _attend(self, name: str, member: MemberInfo, link: Link, coordinator: Coordinator) -> None:
        """Serve the link of one member until the link ends."""
        now_s = asyncio.get_running_loop().time
        try:
            await link.open(self.addr, self.port, _LINK_S)
            logger.info("world=%s member=%s came", name, member.id)
            await self._perform(name, coordinator.join(member, now_s()))
            while True:
                await self._perform(name, coordinator.heard(member.id, await link.receive(), now_s()))
        except (WorldError, OSError, MessageError) as error:
            logger.info("world=%s member=%s is gone: %s", name, member.id, error)
        finally:
            del self._links[name, member.id]
            await link.close()
            if not self._closing:
                await self._perform(name, coordinator.lost(member.id, now_s()))

    # -- actions of the coordinators -------------------------------------------------------------------------------------------

    async def _perform(self, name: str, actions: Sequence[decisions.Action]) -> None:
        """Save the views, then send the messages. Decisions are sent in the order in which they were made.

        It waits for the save, so a member that sends messages faster than the disk can save them is slowed down.
        """
        self._settle(name)
        for action in actions:
            if isinstance(action, Remember):
                logger.info("world=%s epoch=%d members=%s", name, action.view.epoch, ",".join(action.view.ids()))
                self._state.remember(name, action.view)
        async with self._saving:
            try:
                await self._state.flush()
            except (OSError, RuntimeError) as error:
                # The decision is sent all the same. A restart before the next successful write loses it.
                logger.error("the state cannot be written: %s", error)  # noqa: TRY400
            for action in actions:
                match action:
                    case Tell(member_id, message):
                        if link := self._links.get((name, member_id)):
                            link.send(message)
                    case Drop(member_id):
                        if link := self._links.get((name, member_id)):
                            self._spawn(link.close(_LAST_WORDS_S))

    def _settle(self, name: str) -> None:
        """Set the timer of that world to its next deadline, and mark the world as empty if it has no members."""
        coordinator = self._coordinators[name]
        if timer := self._timers.pop(name, None):
            timer.cancel()
        if coordinator.due_s is not None:
            self._timers[name] = asyncio.get_running_loop().call_at(
                coordinator.due_s, lambda: self._spawn(self._tick(name))
            )
        if coordinator.empty and not self.connected(name):
            self._empty.setdefault(name)

    async def _tick(self, name: str) -> None:
        if coordinator := self._coordinators.get(name):
            await self._perform(name, coordinator.tick(asyncio.get_running_loop().time()))

    def _coordinator(self, name: str) -> Coordinator:
        """Return the coordinator of that world. If the world is new and there are too many, forget an empty one."""
        if name not in self._coordinators:
            if len(self._coordinators) >= _MAX_WORLDS:
                self._forget(next(iter(self._empty)))
            # Start after the epochs of forgotten worlds, so that an old epoch cannot be mistaken for one of the new world.
            self._coordinators[name] = self._make_coordinator(View(self._forgotten_epoch, ()))
        self._empty.pop(name, None)
        return self._coordinators[name]

    def _make_coordinator(self, view: View) -> Coordinator:
        return Coordinator(
            first_size=self._first_size,
            patience_s=self._patience_s,
            view=view,
            now_s=asyncio.get_running_loop().time(),
        )

    def _forget(self, name: str) -> None:
        self._forgotten_epoch = max(self._forgotten_epoch, self._coordinators.pop(name).view.epoch)
        del self._empty[name]
        if timer := self._timers.pop(name, None):
            timer.cancel()
        self._state.forget(name)

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _name_obstacle(name: str) -> dict[str, str] | None:
    """Return the rejection of an invalid world name; None if the name is valid."""
    if is_name(name):
        return None
    return {
        "refused": f"the world's name is {name!r:.60}; expected 1 to {MAX_NAME_CHARS} printable ASCII characters without spaces"
    }
