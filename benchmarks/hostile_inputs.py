"""Answers to hostile clients, the time they take, and the effect on well-behaved clients of the same service.

    python -m benchmarks.hostile_inputs                     # prints the table
    python -m benchmarks.hostile_inputs --write docs/hostile-inputs.md

A service with short limits gets each kind of hostile input in turn, while well-behaved clients send requests. The answers to the
well-behaved clients are compared with answers recorded before. Exits with 1 when a hostile input gets an unexpected answer, when a request
of a well-behaved client fails, or when the memory of the leader grows by more than the limit.
"""

import argparse
import asyncio
import datetime
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.hostile.connections import HostileConnections, ask, attack, hostile_connections
from benchmarks.hostile.requests import BODY_LIMIT, HOSTILE_REQUESTS, SIDE, HostileRequest
from benchmarks.ranks import table
from multiworld_serving.common.config import raise_descriptor_limit
from multiworld_serving.testing.load.clients import Load, record_reference_answers, run_load
from multiworld_serving.testing.load.images import photos
from multiworld_serving.testing.local_service import LocalService

GROWTH_MIB = 64
SETTINGS: dict[str, Any] = {
    "model": "resnet18",
    "weights": "random:0",
    "image_size": SIDE,
    "stages": 2,
    "replicas": 2,
    "max_body_bytes": BODY_LIMIT,
    "header_timeout_s": 2.0,
    "stall_timeout_s": 2.0,
    "idle_timeout_s": 3.0,
    "timeout_s": 6.0,
}


@dataclass(frozen=True)
class Row:
    """Result of one kind of hostile input; `neighbours`, `failed` and `slowest_s` are of the requests of well-behaved clients."""

    name: str
    expected: str
    got: str
    took_s: float
    neighbours: int
    failed: int
    slowest_s: float

    @property
    def right(self) -> bool:
        return not self.failed and set(self.got.split(" or ")) <= set(self.expected.split(" or "))


def run(service: LocalService, *, idle: int, slow: int, clients: int = 2) -> list[Row]:
    """Send every kind of hostile input, with `clients` well-behaved clients at the same time."""
    parts = urlsplit(service.url)
    host, port = str(parts.hostname), int(parts.port or 0)
    questions = record_reference_answers(service.url, photos(4))
    rows = []
    with run_load(service.url, questions, clients=clients, timeout_s=30.0) as load:
        _wait_for(load, 2)
        for request in HOSTILE_REQUESTS:
            rows.append(_watched(load, request.name, request.answer, lambda r=request: _one(host, port, r)))  # type: ignore[misc]
        for hostile in hostile_connections(idle=idle, slow=slow):
            name = f"{hostile.count:,} {hostile.name}"
            rows.append(_watched(load, name, hostile.answer, lambda h=hostile: _many(host, port, h)))  # type: ignore[misc]
    return rows


def _watched(load: Load, name: str, expected: str, act: Callable[[], Awaitable[str]]) -> Row:
    """Run `act` once. The row also covers the requests of well-behaved clients that overlap with it."""
    began_s, began = time.time(), time.perf_counter()
    got = asyncio.run(_awaited(act))
    took_s, ended_s = time.perf_counter() - began, time.time()
    _wait_for(load, len(load.samples) + 2)
    seen = load.between(began_s, ended_s)
    slowest_s = max((sample.took_s for sample in seen), default=0.0)
    return Row(
        name,
        expected,
        got,
        took_s,
        len(seen),
        sum(sample.status != 200 or bool(sample.error) for sample in seen),
        slowest_s,
    )


def _wait_for(load: Load, samples: int) -> None:
    """Wait until `samples` requests of well-behaved clients have ended. Each ends within its timeout of 30 s."""
    while len(load.samples) < samples:
        time.sleep(0.002)


async def _awaited(act: Callable[[], Awaitable[str]]) -> str:
    return await act()


async def _one(host: str, port: int, request: HostileRequest) -> str:
    return await ask(host, port, request)


async def _many(host: str, port: int, hostile: HostileConnections) -> str:
    return " or ".join(sorted(await attack(host, port, hostile)))


def document(rows: Sequence[Row], growth: str, connections: int) -> str:
    """The documentation page with the results, as Markdown."""
    facts = SETTINGS | {"growth": growth, "connections": connections, "cores": len(os.sched_getaffinity(0))}
    lines = [_HEAD.format(date=datetime.datetime.now(datetime.UTC).date(), **facts)]
    lines += ["| input | answer | time | neighbours: asked, failed, slowest |", "|---|---|---|---|"]
    for row in rows:
        neighbours = f"{row.neighbours}, {row.failed}, {row.slowest_s * 1e3:.0f} ms"
        lines.append(f"| {row.name} | {row.expected} | {row.took_s * 1e3:.0f} ms | {neighbours} |")
    return "\n".join([*lines, ""])


_HEAD = """# Hostile inputs

What clients get who send what no client should, and what their neighbours notice of it. Made on {date} ({cores} cores, shared with other
work) by `python -m benchmarks.hostile_inputs --write docs/hostile-inputs.md`. A test asks a real service all of it, and holds its answers
against this table.

The service had short limits (`header_timeout_s` and `stall_timeout_s` {header_timeout_s:g}, `timeout_s` {timeout_s:g},
`idle_timeout_s` {idle_timeout_s:g} seconds, bodies up to {max_body_bytes:,} bytes, {connections:,} connections), two stages with
two replicas, and two clients that asked it all the time; each of their answers was compared with that of the quiet service. The time
is from the connection to the answer; of several connections, until the last one had its end. All clients computed on the
same cores as the service. {growth}

An answer is the HTTP status and the `reason` of the error; *closed* is a connection that ended without one, because it had asked
nothing, or had hung up. [http.md](http.md) explains the reasons, [security.md](security.md) the limits.
"""


def main() -> int:
    options = _options()
    raise_descriptor_limit()
    with LocalService(max_connections=options.connections, **SETTINGS) as service:
        before = _resident_mib(service.pid)
        run(service, idle=options.idle, slow=options.slow)  # let bounded caches and buffers grow to their limits
        settled = _resident_mib(service.pid)
        rows = run(service, idle=options.idle, slow=options.slow)
        after = _resident_mib(service.pid)
    growth = (
        f"Resident memory of frontend and leader: {before:.0f} MiB at first, {settled:.0f} after all of it, {after:.0f} after "
        "all of it again."
    )
    columns = ["input", "answer", "ms", "neighbours asked", "failed", "slowest ms", "as it should be"]
    table("Hostile inputs", columns, [_cells(row) for row in rows])
    print(growth)
    if options.write is not None:
        options.write.write_text(document(rows, growth, options.connections))
    return 0 if all(row.right for row in rows) and after < settled + GROWTH_MIB else 1


def _cells(row: Row) -> list[str]:
    times = (f"{seconds * 1e3:.0f}" for seconds in (row.took_s, row.slowest_s))
    took, slowest = times
    verdict = "yes" if row.right else f"NO: {row.expected}"
    return [row.name, row.got, took, str(row.neighbours), str(row.failed), slowest, verdict]


def _resident_mib(supervisor: int) -> float:
    """Of the frontend and the leader together, which are children of the supervisor."""
    found_kib = 0
    for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"worker" not in command and b"fork_server" not in command:
            text = Path(f"/proc/{pid}/status").read_text()
            found_kib += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS:"))
    return found_kib / 1024


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=10_000, help="connections that say nothing")
    parser.add_argument("--slow", type=int, default=200, help="connections of each slow kind")
    parser.add_argument("--connections", type=int, default=1000, help="max_connections of the service")
    parser.add_argument("--write", type=Path, help="write the page of the documentation")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
