"""The ports of one process: behind each are the worlds that it hosts there, and who answers questions."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from multiworld.reception import Reception, bind
from multiworld.rendezvous import Pulse
from multiworld.watchdog import WatchDog
from multiworld.world import World

logger = logging.getLogger(__name__)

Answerer = Callable[[str, str], Awaitable[bytes]]
"""(question, host of who asks) → answer."""


@dataclass(slots=True)
class Door:
    """A listening port: kept open for good when it is pinned, or for as long as a world is hosted behind it."""

    reception: Reception
    pinned: bool = False
    worlds: set[World] = field(default_factory=set)

    def answer(self, answerer: Answerer) -> None:
        """Answer what is asked here, on the loop that runs now."""
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()

        async def answer(question: str, host: str, reply: Callable[[bytes | None], None]) -> None:
            data = None
            try:
                data = await answerer(question, host)
            except Exception:
                logger.exception("a question from %s found no answer", host)
            reply(data)

        def start(question: str, host: str, reply: Callable[[bytes | None], None]) -> None:
            task = loop.create_task(answer(question, host, reply))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        def on_question(question: str, host: str, reply: Callable[[bytes | None], None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody answers any more
                loop.call_soon_threadsafe(start, question, host, reply)

        self.reception.on_question = on_question


class Doors:
    """All of them, by address and port. Guarded by whose they are.

    Args:
        secret: who knows it may come in.
    """

    def __init__(self, secret: bytes, pulse: Pulse) -> None:
        self._secrets: tuple[bytes, ...] = (secret,)
        self._pulse = pulse
        self._doors: dict[tuple[str, int], Door] = {}

    def at(self, addr: str, port: int) -> Door:
        """One that is open. Raises KeyError."""
        return self._doors[listening_host(addr), port]

    def open(self, host: str, port: int, watchdog: Callable[[], WatchDog]) -> Door:
        """The door there, which may be open already.

        Args:
            host: of `listening_host`.
            port: 0 lets the kernel choose.
            watchdog: gives who serves a new one; asked once the port is ours.
        Raises OSError when this process cannot listen there.
        """
        door = self._doors.get((host, port))
        if door is None:
            sock = bind(host, port)
            serving = watchdog()
            reception = Reception(serving, sock, self._secrets, self._pulse)
            serving.call_soon(reception.open)
            door = self._doors[host, reception.port] = Door(reception)
        return door

    def let_in(self, secrets: tuple[bytes, ...]) -> None:
        """Who knows one of these may come in from now on, and nobody else."""
        self._secrets = secrets
        for door in self._doors.values():
            door.reception.secrets = secrets

    def leave(self, world: World) -> None:
        """That world has ended."""
        for door in self._doors.values():
            door.worlds.discard(world)

    def close_idle(self) -> None:
        """Close those that nothing needs. On the watchdog's thread."""
        for key in [key for key, door in self._doors.items() if not door.worlds and not door.pinned]:
            self._doors.pop(key).reception.close()

    def give_up(self) -> list[Door]:
        """All of them, still open, and for who calls this to close."""
        doors, self._doors = list(self._doors.values()), {}
        return doors


def listening_host(addr: str) -> str:
    """The address to bind for `addr`: the loopback and wildcard ones as they are, a name as this machine resolves it."""
    return str(socket.getaddrinfo(addr, None, type=socket.SOCK_STREAM)[0][4][0])
