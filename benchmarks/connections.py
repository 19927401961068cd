"""HTTP clients with little overhead: prepared request bytes over persistent connections. They share the cores with the measured server."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """Results of the requests of one phase.

    Attributes:
        seconds: duration of the phase.
        statuses: number of answers by HTTP status.
        times_s: seconds from the start of the request to the complete answer, by HTTP status.
        retry_after_s: values of the Retry-After headers, in seconds.
        unanswered: requests whose connection failed.
        bodies: bodies of the answers; None if they are not recorded.
    """

    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    times_s: dict[int, list[float]] = field(default_factory=dict)
    retry_after_s: list[float] = field(default_factory=list)
    unanswered: int = 0
    bodies: list[bytes] | None = None

    @property
    def goodput(self) -> float:
        """Answers with status 200 per second."""
        return self.statuses[200] / self.seconds

    @property
    def failed(self) -> int:
        """Number of requests without an answer with status 200."""
        return self.statuses.total() - self.statuses[200] + self.unanswered

    def add(self, status: int, took_s: float, headers: bytes, body: bytes) -> None:
        if self.bodies is not None:
            self.bodies.append(body)
        self.statuses[status] += 1
        self.times_s.setdefault(status, []).append(took_s)
        for line in headers.lower().split(b"\r\n"):
            if line.startswith(b"retry-after:"):
                self.retry_after_s.append(float(line.partition(b":")[2]))


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
                body = await reader.readexactly(length)
                break
            except (OSError, asyncio.IncompleteReadError) as error:
                if reused and not getattr(error, "partial", b""):
                    continue  # the server closed the idle connection: retry on another one
                outcome.unanswered += 1
                return
        outcome.add(int(headers[9:12]), time.perf_counter() - began_s, headers, body)
        if b"connection: close" in headers.lower():
            writer.close()
        else:
            self._idle.append((reader, writer))

    async def closed_loop(self, request: bytes, clients: int, seconds: float, *, bodies: bool = False) -> Outcome:
        """Each client sends its next request when the last one is answered. After `seconds`, waits for the requests in flight."""
        outcome, end_s = Outcome(seconds, bodies=[] if bodies else None), time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < end_s:
                await self.ask(request, outcome)

        began_s = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        outcome.seconds = time.perf_counter() - began_s
        return outcome

    async def open_loop(self, request: bytes, rate: float, seconds: float) -> Outcome:
        """Send one request every 1/rate seconds, without waiting for answers. Late requests are sent at once to keep the rate."""
        outcome, tasks, began_s = Outcome(), set[asyncio.Task[None]](), time.perf_counter()
        for number in range(int(rate * seconds)):
            if (pause_s := began_s + number / rate - time.perf_counter()) > 0:
                await asyncio.sleep(pause_s)
            task = asyncio.create_task(self.ask(request, outcome))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        sent_s = time.perf_counter() - began_s
        await asyncio.gather(*tasks)
        outcome.seconds = sent_s
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
