"""The rendezvous of elastic worlds: a small process outside of them that decides who makes up the next epoch.

    async with ElasticRendezvous(port=29600, first_size=4, state_file=Path("elastic.json")) as rendezvous:
        await rendezvous.serve()

or `python -m multiworld.elastic --port 29600 --first-size 4 --state-file elastic.json`. What it decides is in
multiworld/elastic/coordinator.py. No tensor passes through it, and while no membership changes it has nothing to do: worlds go on
without it. With a `state_file` it may be killed and started again at any time.
"""

import asyncio
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from multiworld.elastic import coordinator as decisions
from multiworld.elastic.coordinator import Coordinator, Drop, Remember, Tell
from multiworld.elastic.link import Link, link_name
from multiworld.elastic.messages import MessageError, Seating, View, decode, encode, seating
from multiworld.errors import WorldError
from multiworld.world_manager import WorldManager

logger = logging.getLogger(__name__)

DEFAULT_PORT = 29600
_LINK_S = 10.0
"""How long a member that has been let in may take to connect."""
_LAST_WORDS_S = 1.0
_MAX_WORLDS = 10_000


class ElasticRendezvous:
    """Decides for any number of elastic worlds. Use it as `async with`; nothing is started before.

    Args:
        addr, port: where it listens; port 0 takes a free one, `port` says which.
        first_size: the first epoch of a world is formed when so many members have come.
        patience_s: how long a member that is alive may take to ask for the next epoch when its own is over. Its event loop must run
            once in that time, or it is evicted.
        state_file: remembers the views, so that this process may be restarted; None forgets them with the process, and then no world that
            breaks after a restart forms again.
        secret: whoever joins must know it.
        heartbeat_interval_s, heartbeat_timeout_s: a member that is silent for so long is lost.
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
        self._state_file = state_file
        self._manager = WorldManager(
            secret=secret, heartbeat_interval_s=heartbeat_interval_s, heartbeat_timeout_s=heartbeat_timeout_s
        )
        self._coordinators: dict[str, Coordinator] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def __aenter__(self) -> "ElasticRendezvous":
        """Raises OSError when it cannot listen there, ValueError for a state file that is none."""
        for name, view in _load(self._state_file).items():
            self._coordinator(name, view)
            self._set_timer(name)
        self.port = self._manager.listen(self.addr, self.port)
        self._manager.answer(self.addr, self.port, self._answer)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing = True  # that we go is no reason to give anybody up
        for timer in self._timers.values():
            timer.cancel()
        for link in list(self._links.values()):
            await link.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._manager.aclose()

    async def serve(self) -> None:
        """Decide until cancelled."""
        await asyncio.get_running_loop().create_future()

    def view(self, world_name: str) -> View:
        """The current epoch of that world, and who is in it; epoch 0 before the first."""
        known = self._coordinators.get(world_name)
        return known.view if known else View(0, ())

    def connected(self, world_name: str) -> int:
        """How many members and newcomers of that world are connected."""
        return sum(name == world_name for name, _ in self._links)

    def waiting(self, world_name: str) -> int:
        """How many newcomers wait for the members of that world to come to a boundary."""
        known = self._coordinators.get(world_name)
        return known.waiting if known else 0

    # -- members that come ---------------------------------------------------------------------------------------------------

    async def _answer(self, question: str, _host: str) -> bytes:
        """What a member is told that wants to join: the name of the world of two that it meets us in; or why it cannot."""
        try:
            fields = json.loads(question)
            name, member, resume = str(fields["elastic"]), seating(fields["member"]), fields["resume"] is True
        except (ValueError, KeyError, TypeError, MessageError):
            return json.dumps({"refused": "not a question about an elastic world"}).encode()
        obstacle = self._obstacle(name, member.id, resume)
        if obstacle is None:
            self._spawn(self._attend(name, member))
        return json.dumps(obstacle or {"link": link_name(name, member.id)}).encode()

    def _obstacle(self, name: str, member_id: str, resume: bool) -> dict[str, str] | None:
        """What keeps a member from coming: for now (`later`), because it was given up (`evicted`), or for good (`refused`)."""
        known = self._coordinators.get(name)
        if self._closing or (name, member_id) in self._links:
            return {"later": "the rendezvous is ending" if self._closing else "connected already"}
        if known is None and len(self._coordinators) >= _MAX_WORLDS:
            return {"refused": "too many worlds"}
        if resume and (known is None or not known.view.epoch):
            return {"refused": f"this rendezvous knows no world {name!r}"}
        if resume and known is not None and not known.may_resume(member_id):
            return {"evicted": f"given up, epoch {known.view.epoch} is current now"}
        return None

    async def _attend(self, name: str, member: Seating) -> None:
        """Be there for one member, as long as it is."""
        link = self._links[name, member.id] = Link(self._manager, link_name(name, member.id), 0)
        coordinator = self._coordinator(name)
        now_s = asyncio.get_running_loop().time
        try:
            await link.open(self.addr, self.port, _LINK_S)
            logger.info("world=%s member=%s came", name, member.id)
            self._perform(name, coordinator.join(member, now_s()))
            while True:
                self._perform(name, coordinator.heard(member.id, await link.receive(), now_s()))
        except (WorldError, MessageError) as error:
            logger.info("world=%s member=%s is gone: %s", name, member.id, error)
        finally:
            del self._links[name, member.id]
            await link.close()
            if not self._closing:
                self._perform(name, coordinator.lost(member.id, now_s()))

    # -- what was decided ------------------------------------------------------------------------------------------------------

    def _perform(self, name: str, actions: Sequence[decisions.Action]) -> None:
        for action in actions:
            match action:
                case Remember(view):
                    logger.info("world=%s epoch=%d members=%s", name, view.epoch, ",".join(view.ids()))
                    try:
                        self._save()
                    except OSError as error:  # a restart now would forget this epoch; its members go on without one
                        logger.error("the state cannot be written to %s: %s", self._state_file, error)  # noqa: TRY400
                case Tell(member_id, message):
                    if link := self._links.get((name, member_id)):
                        link.send(message)
                case Drop(member_id):
                    if link := self._links.get((name, member_id)):
                        self._spawn(link.close(_LAST_WORDS_S))
        self._set_timer(name)

    def _set_timer(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()
        due_s = self._coordinators[name].due_s
        if due_s is not None:
            self._timers[name] = asyncio.get_running_loop().call_at(due_s, self._tick, name)

    def _tick(self, name: str) -> None:
        self._perform(name, self._coordinators[name].tick(asyncio.get_running_loop().time()))

    def _coordinator(self, name: str, view: View | None = None) -> Coordinator:
        if name not in self._coordinators:
            self._coordinators[name] = Coordinator(
                first_size=self._first_size,
                patience_s=self._patience_s,
                view=view,
                now_s=asyncio.get_running_loop().time(),
            )
        return self._coordinators[name]

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _save(self) -> None:
        if self._state_file is None:
            return
        views = {name: encode(each.view).decode() for name, each in self._coordinators.items() if each.view.epoch}
        beside = self._state_file.with_name(self._state_file.name + ".new")
        with beside.open("w") as file:
            json.dump(views, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._state_file)


def _load(state_file: Path | None) -> dict[str, View]:
    """Raises ValueError when the file holds something else."""
    if state_file is None or not state_file.exists():
        return {}
    try:
        views = {name: decode(text.encode()) for name, text in json.loads(state_file.read_text()).items()}
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{state_file} does not hold the state of a rendezvous; move it away to forget it") from error
    return {name: view for name, view in views.items() if isinstance(view, View)}
