"""A TCP proxy between members, to cut them off from each other without ending a process or a connection."""

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Callable

Translate = Callable[[bytes], bytes]

HOST = "127.0.0.5"
"""Where rank 0 of a `Line` listens. Of two members the one with the lower address waits for the other to connect: with the other one on
127.0.0.1 their order stays the same when the ports are those of proxies."""
_ADDRESS = re.compile(rb"\x02\x00(..)(\x7f\x00\x00.)", re.DOTALL)
"""A sockaddr_in of this machine, as Gloo publishes where it listens."""


class Proxy:
    """Forwards what comes to its port to `target_port` of the same host, until it is frozen: each connection by itself."""

    def __init__(self, host: str, target_port: int, translate: Translate | None = None) -> None:
        self.host = host
        self.used = asyncio.Event()
        """Set by the first connection."""
        self._target_port = target_port
        self._translate = translate or (lambda data: data)
        self._flows: list[asyncio.Event] = []  # one a connection, in the order in which they came
        self._tasks: set[asyncio.Task[None]] = set()
        self._sock = socket.create_server((host, 0))
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]
        self._spawn(self._accept())

    def freeze(self, connections: slice = slice(None)) -> None:
        """Forward nothing any more on these connections; all stay open."""
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
            self.used.set()
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
                await loop.sock_sendall(target, self._translate(data))
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


class Line:
    """All that goes between two members of a world: behind one proxy the lifeline, which comes first, and the line of their messages;
    behind others the connections of their group.
    """

    def __init__(self, join_port: int) -> None:
        self._joining = Proxy(HOST, join_port, self._divert)
        self.carries_data = asyncio.Event()
        """Set once the members' group is connected through here."""
        self._data: dict[int, Proxy] = {}

    @property
    def port(self) -> int:
        """Where the other member joins."""
        return self._joining.port

    def freeze_lifeline(self) -> None:
        self._joining.freeze(slice(0, 1))

    def freeze_data(self) -> None:
        self._joining.freeze(slice(1, None))
        for proxy in self._data.values():
            proxy.freeze()

    async def close(self) -> None:
        for proxy in [self._joining, *self._data.values()]:
            await proxy.close()

    def _divert(self, data: bytes) -> bytes:
        """Let every address that is published on the lifeline lead to a proxy."""

        def divert(address: re.Match[bytes]) -> bytes:
            host, port = socket.inet_ntoa(address[2]), int.from_bytes(address[1], "big")
            if port not in self._data:
                self._data[port] = Proxy(host, port)
                self._data[port].used = self.carries_data
            return b"\x02\x00" + self._data[port].port.to_bytes(2, "big") + address[2]

        return _ADDRESS.sub(divert, data)


@contextlib.asynccontextmanager
async def line_to(join_port: int) -> AsyncIterator[Line]:
    line = Line(join_port)
    try:
        yield line
    finally:
        await line.close()
