"""Three times the load that the service can carry: what it still answers, how it refuses the rest, and what that costs.

    python -m benchmarks.overload
    python -m benchmarks.overload --factor 5 --seconds 60 --deadline 2

First a closed loop finds the capacity: the most answers a second over a few numbers of clients. Then requests come at a fixed
rate, `factor` times that, each with a deadline, whether or not those before were answered. Exits 1 when the goodput falls below
90 % of the capacity, a request goes unanswered, or the leader grows.

The clients run on the same cores as the service, and are kept lean: bytes made once, over connections that stay open.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import uvloop

from benchmarks.ranks import table
from chaos.images import photo
from deploy.service import LocalService

GROWTH_MIB = 64
"""How much resident memory may grow under overload: the queue, bodies that are being received, and what malloc keeps."""


@dataclass(slots=True)
class Outcome:
    """What came of the requests of one phase."""

    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    times_s: dict[int, list[float]] = field(default_factory=dict)
    retry_after_s: list[float] = field(default_factory=list)
    unanswered: int = 0

    @property
    def goodput(self) -> float:
        """Answers a second."""
        return self.statuses[200] / self.seconds

    def add(self, status: int, took_s: float, headers: bytes) -> None:
        self.statuses[status] += 1
        self.times_s.setdefault(status, []).append(took_s)
        for line in headers.lower().split(b"\r\n"):
            if line.startswith(b"retry-after:"):
                self.retry_after_s.append(float(line.partition(b":")[2]))

    def median_ms(self, status: int) -> str:
        times = self.times_s.get(status)
        return f"{1e3 * statistics.median(times):.0f}" if times else "-"


class Connections:
    """Connections to the service, taken and given back."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._address = host, int(port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, request: bytes, outcome: Outcome) -> None:
        """Send one request, and write down what comes back."""
        began_s = time.perf_counter()
        while True:
            reused = bool(self._idle)
            try:
                reader, writer = self._idle.pop() if reused else await asyncio.open_connection(*self._address)
                writer.write(request)
                headers = await reader.readuntil(b"\r\n\r\n")
                length = int(headers.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
                break
            except (OSError, asyncio.IncompleteReadError) as error:
                if reused and not getattr(error, "partial", b""):
                    continue  # it had been idle for so long that the server closed it just then
                outcome.unanswered += 1
                return
        outcome.add(int(headers[9:12]), time.perf_counter() - began_s, headers)
        if b"connection: close" in headers.lower():
            writer.close()
        else:
            self._idle.append((reader, writer))

    async def closed_loop(self, request: bytes, clients: int, seconds: float) -> Outcome:
        outcome, end_s = Outcome(seconds), time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < end_s:
                await self.ask(request, outcome)

        began_s = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        outcome.seconds = time.perf_counter() - began_s
        return outcome

    async def open_loop(self, request: bytes, rate: float, seconds: float) -> Outcome:
        """One request every 1/rate seconds; what is late is caught up with, so that the rate holds."""
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


def request_bytes(body: bytes, deadline_s: float | None) -> bytes:
    deadline = f"X-Request-Timeout-S: {deadline_s:g}\r\n" if deadline_s else ""
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\n{deadline}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def resident_mib(pid: int) -> float:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) / 1024


async def run(service: LocalService, options: argparse.Namespace) -> bool:
    """Both phases. Gives whether all went well."""
    body, connections = photo(), Connections(service.url)
    best = Outcome(1.0)
    rows = []
    for clients in options.clients:
        outcome = await connections.closed_loop(request_bytes(body, None), clients, options.seconds / 3)
        rows.append([f"closed, {clients} clients", f"{outcome.goodput:.1f}", *_row(outcome)])
        best = max(best, outcome, key=lambda each: each.goodput)
    before_mib = resident_mib(service.pid)
    rate = options.factor * best.goodput
    over = await connections.open_loop(request_bytes(body, options.deadline), rate, options.seconds)
    after_mib = resident_mib(service.pid)
    rows.append([f"open, {rate:.0f}/s, deadline {options.deadline:g} s", f"{over.goodput:.1f}", *_row(over)])
    columns = ("load", "answers/s", "200", "429", "504", "other", "median ms of 200", "of 429", "Retry-After s")
    table(f"{options.model}, {options.stages} stages of {options.replicas}", columns, rows)
    share = over.goodput / best.goodput
    print(
        f"goodput at {options.factor:g} times the capacity: {100 * share:.0f} % of {best.goodput:.1f}/s; "
        f"leader {before_mib:.0f} -> {after_mib:.0f} MiB; unanswered {over.unanswered}; "
        f"lost {service.metric('multiworld_requests_lost_total'):.0f}"
    )
    return share >= 0.9 and not over.unanswered and after_mib - before_mib < GROWTH_MIB


def _row(outcome: Outcome) -> list[str]:
    other = sum(count for status, count in outcome.statuses.items() if status not in (200, 429, 504))
    retry = f"{statistics.median(outcome.retry_after_s):.1f}" if outcome.retry_after_s else "-"
    counts = [str(count) for count in (outcome.statuses[200], outcome.statuses[429], outcome.statuses[504], other)]
    return [*counts, outcome.median_ms(200), outcome.median_ms(429), retry]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--clients", type=int, nargs="+", default=[16, 32, 64], help="of the closed loops")
    parser.add_argument("--factor", type=float, default=3.0, help="of the capacity")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the overload")
    parser.add_argument("--deadline", type=float, default=2.0, help="of each request, in seconds")
    chosen = parser.parse_args()
    with LocalService(
        model=chosen.model, weights="random:0", stages=chosen.stages, replicas=chosen.replicas
    ) as running:
        sys.exit(0 if uvloop.run(run(running, chosen)) else 1)
