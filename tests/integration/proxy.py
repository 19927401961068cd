"""A TCP proxy between members, to cut them off from each other without ending a process or a connection."""

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Callable

Translate = Callable[[bytes], bytes]

_LOOPBACK_ADDRESS = re.compile(rb"\x02\x00(..)\x7f\x00\x00\x01", re.DOTALL)
"""A sockaddr_in on 127.0.0.1, as Gloo publishes where it listens."""


class Proxy:
    """Forwards what comes to its port to `target_port`, as long as it `flows`."""

    def __init__(self, target_port: int, translate: Translate | None = None) -> None:
        self.connections = 0
        self._target_port = target_port
        self._translate = translate or (lambda data: data)
        self._flows = asyncio.Event()
        self._flows.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sock = socket.create_server(("127.0.0.1", 0))
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]
        self._spawn(self._accept())

    def freeze(self) -> None:
        """Forward nothing any more; all connections stay open."""
        self._flows.clear()

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
                await loop.sock_connect(there, ("127.0.0.1", self._target_port))
            except OSError:
                here.close()
                there.close()
                continue
            self.connections += 1
            self._spawn(self._join(here, there))

    async def _join(self, here: socket.socket, there: socket.socket) -> None:
        with here, there:
            await asyncio.gather(self._forward(here, there), self._forward(there, here))

    async def _forward(self, source: socket.socket, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(source, 1 << 16):
                await self._flows.wait()
                await loop.sock_sendall(target, self._translate(data))
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


class Line:
    """All that goes between two members of a world: the lifeline, and the data of its group, each behind a proxy of its own."""

    def __init__(self, join_port: int) -> None:
        self.lifeline = Proxy(join_port, self._divert)
        self._data: dict[int, Proxy] = {}

    @property
    def data_connections(self) -> int:
        return sum(proxy.connections for proxy in self._data.values())

    def freeze_data(self) -> None:
        for proxy in self._data.values():
            proxy.freeze()

    async def close(self) -> None:
        for proxy in [self.lifeline, *self._data.values()]:
            await proxy.close()

    def _divert(self, data: bytes) -> bytes:
        """Let every address that is published on the lifeline lead to a proxy."""

        def divert(address: re.Match[bytes]) -> bytes:
            port = int.from_bytes(address[1], "big")
            if port not in self._data:
                self._data[port] = Proxy(port)
            return b"\x02\x00" + self._data[port].port.to_bytes(2, "big") + b"\x7f\x00\x00\x01"

        return _LOOPBACK_ADDRESS.sub(divert, data)


@contextlib.asynccontextmanager
async def line_to(join_port: int) -> AsyncIterator[Line]:
    line = Line(join_port)
    try:
        yield line
    finally:
        await line.close()
