"""HTTP clients with little overhead: prepared request bytes over persistent connections. They share the cores with the measured server."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle


@dataclass(slots=True)
class Outcome:
    """Results of the requests of one phase.

    Attributes:
        seconds: duration of the phase.
        statuses: number of answers by HTTP status.
        times_s: seconds from the start of the request to the complete answer, by HTTP status.
        unanswered: requests whose connection failed.
    """

    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    times_s: dict[int, list[float]] = field(default_factory=dict)
    unanswered: int = 0

    @property
    def goodput(self) -> float:
        """Answers with status 200 per second."""
        return self.statuses[200] / self.seconds

    @property
    def failed(self) -> int:
        """Number of requests without an answer with status 200."""
        return self.statuses.total() - self.statuses[200] + self.unanswered

    def add(self, status: int, took_s: float) -> None:
        self.statuses[status] += 1
        self.times_s.setdefault(status, []).append(took_s)


class Connections:
    """A pool of connections to a service."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._address = host, int(port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, request: bytes, outcome: Outcome) -> None:
        """Send one request and record the result in `outcome`."""
        began_s = time.perf_counter()
        while True:
            reused = bool(self._idle)
            try:
                reader, writer = self._idle.pop() if reused else await asyncio.open_connection(*self._address)
                writer.write(request)
                headers = await reader.readuntil(b"\r\n\r\n")
                length = int(headers.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
                break
            except (OSError, asyncio.IncompleteReadError) as error:
                if reused and not getattr(error, "partial", b""):
                    continue  # the server closed the idle connection: retry on another one
                outcome.unanswered += 1
                return
        outcome.add(int(headers[9:12]), time.perf_counter() - began_s)
        if b"connection: close" in headers.lower():
            writer.close()
        else:
            self._idle.append((reader, writer))

    async def closed_loop(self, requests: Sequence[bytes], clients: int, seconds: float) -> Outcome:
        """Each client sends the next request when its last one is answered. After `seconds`, waits for the requests in flight."""
        outcome, end_s, following = Outcome(seconds), time.perf_counter() + seconds, cycle(requests)

        async def client() -> None:
            while time.perf_counter() < end_s:
                await self.ask(next(following), outcome)

        began_s = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        outcome.seconds = time.perf_counter() - began_s
        return outcome

    def close(self) -> None:
        """Close the idle connections."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


def request_bytes(path: str, content_type: str, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    """The bytes of an HTTP POST request."""
    said = {"Host": "x", "Content-Type": content_type, "Content-Length": str(len(body))} | (headers or {})
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in said.items())]
    return "\r\n".join([*lines, "\r\n"]).encode() + body
