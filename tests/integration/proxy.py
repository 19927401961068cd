"""A TCP proxy between members, to interrupt their communication without ending a process or a connection."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

HOST = "127.0.0.5"
"""Where rank 0 listens."""


class Proxy:
    """Forwards connections to `target_port` of the same host until they are frozen, each connection separately."""

    def __init__(self, host: str, target_port: int) -> None:
        self.host = host
        self._target_port = target_port
        self._flows: list[asyncio.Event] = []  # one per connection, in order of arrival
        self._tasks: set[asyncio.Task[None]] = set()
        self._sock = socket.create_server((host, 0))
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]
        self._spawn(self._accept())

    def freeze(self, connections: slice = slice(None)) -> None:
        """Stop forwarding on these connections; they stay open."""
        for flows in self._flows[connections]:
            flows.clear()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sock.close()

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> None:
        self._tasks.add(asyncio.get_running_loop().create_task(work))

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            here, _ = await loop.sock_accept(self._sock)
            there = socket.socket()
            there.setblocking(False)
            try:
                await loop.sock_connect(there, (self.host, self._target_port))
            except OSError:
                here.close()
                there.close()
                continue
            self._spawn(self._join(here, there))

    async def _join(self, here: socket.socket, there: socket.socket) -> None:
        flows = asyncio.Event()
        flows.set()
        self._flows.append(flows)
        with here, there:
            await asyncio.gather(self._forward(here, there, flows), self._forward(there, here, flows))

    async def _forward(self, source: socket.socket, target: socket.socket, flows: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(source, 1 << 16):
                await flows.wait()
                await loop.sock_sendall(target, data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


LIFELINE, DATA = slice(0, 1), slice(1, None)
"""The connections between two members of a world: the control connection is the first one."""


@contextlib.asynccontextmanager
async def proxy_to(join_port: int) -> AsyncIterator[Proxy]:
    """A proxy to rank 0, which listens on `HOST`, while the block lasts."""
    proxy = Proxy(HOST, join_port)
    try:
        yield proxy
    finally:
        await proxy.close()
