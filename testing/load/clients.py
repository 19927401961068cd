"""HTTP clients in a closed or open loop that check every answer."""

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import httpx

from multiworld_serving.common.config.client_options import NO_CREDENTIALS
from multiworld_serving.testing.load.requests import ReferenceRequest

Ended: TypeAlias = Callable[[], bool]
"""Whether no further request is sent."""
_UNREACHABLE_PAUSE_S = 0.1
_MAX_OPEN = 4096
"""Maximum requests in flight of an open loop; further requests are counted as unsent."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Times on the clock of `time.time()`."""

    sent_s: float
    took_s: float
    status: int
    """HTTP status; 0 if there was no response."""
    error: str = ""
    """Error message; empty if the answer was correct."""

    @property
    def done_s(self) -> float:
        return self.sent_s + self.took_s

    @property
    def refused(self) -> bool:
        """Refused with 429 because of overload."""
        return self.status == 429

    @property
    def failed(self) -> bool:
        return not self.refused and (self.status != 200 or bool(self.error))


@dataclass(slots=True)
class Load:
    """Results of a load, in the order of completion.

    Attributes:
        unsent: requests of an open loop that were not sent because too many were in flight.
    """

    samples: list[Sample] = field(default_factory=list)
    unsent: int = 0

    @property
    def failed(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.failed]


async def send(client: httpx.AsyncClient, url: str, request: ReferenceRequest, request_id: str) -> Sample:
    """Send one request and check the response. Failures of service or network become a Sample, not an exception."""
    headers = request.headers | {"x-request-id": request_id}
    sent_s, started_s = time.time(), time.perf_counter()
    try:
        answer = await client.post(url + request.path, content=request.body, headers=headers)
        took_s = time.perf_counter() - started_s
        return Sample(sent_s, took_s, answer.status_code, request.find_error(answer, request_id))
    except httpx.HTTPError as error:
        return Sample(sent_s, time.perf_counter() - started_s, 0, repr(error))


async def _closed_loop(send_next: Callable[[int], Awaitable[Sample]], load: Load, clients: int, ended: Ended) -> None:
    """Run clients that each send their next request after the previous answer."""
    numbers = itertools.count()

    async def one() -> None:
        while not ended():
            sample = await send_next(next(numbers))
            load.samples.append(sample)
            if not sample.status:  # no connection: do not retry a thousand times per second
                await asyncio.sleep(_UNREACHABLE_PAUSE_S)

    await asyncio.gather(*(one() for _ in range(clients)))


async def _open_loop(
    send_next: Callable[[int], Awaitable[Sample]], load: Load, rate_hz: float, seed: int, ended: Ended
) -> None:
    """Send requests at random times (Poisson, `rate_hz` per second), independent of the answers."""
    generator, due_s = random.Random(seed), time.perf_counter()
    in_flight: set[asyncio.Task[None]] = set()

    async def one(number: int, due_s: float) -> None:
        late_s = time.perf_counter() - due_s  # of this event loop; counts as latency, load on the service may cause it
        sample = await send_next(number)
        load.samples.append(replace(sample, sent_s=sample.sent_s - late_s, took_s=sample.took_s + late_s))

    async with asyncio.TaskGroup() as tasks:
        for number in itertools.count():
            due_s += generator.expovariate(rate_hz)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            if ended():
                break
            if len(in_flight) < _MAX_OPEN:
                task = tasks.create_task(one(number, due_s))
                in_flight.add(task)
                task.add_done_callback(in_flight.discard)
            else:
                load.unsent += 1


@contextmanager
def run_load(
    url: str,
    requests: Sequence[ReferenceRequest],
    *,
    clients: int = 8,
    rate_hz: float | None = None,
    timeout_s: float = 120.0,
    seed: int = 0,
    credentials: Mapping[str, Any] = NO_CREDENTIALS,
) -> Iterator[Load]:
    """Run a load in a background thread while the block runs; at its end, waits for all requests in flight.

    Args:
        rate_hz: requests per second of an open loop; None runs `clients` in a closed loop.
    """
    load = Load()

    async def send_all(ended: Ended) -> None:
        limits = httpx.Limits(max_connections=None if rate_hz else clients, max_keepalive_connections=max(clients, 64))
        async with httpx.AsyncClient(limits=limits, timeout=timeout_s, **credentials) as http:

            def send_next(number: int) -> Awaitable[Sample]:
                return send(http, url, requests[number % len(requests)], f"chaos-{number}")

            if rate_hz:
                await _open_loop(send_next, load, rate_hz, seed, ended)
            else:
                await _closed_loop(send_next, load, clients, ended)

    over = threading.Event()
    sending = threading.Thread(target=lambda: asyncio.run(send_all(over.is_set)), name="chaos-load", daemon=True)
    sending.start()
    try:
        yield load
    finally:
        over.set()
        sending.join()
