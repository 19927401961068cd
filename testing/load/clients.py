"""HTTP clients in a closed or open loop that check every answer."""

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from multiworld_serving.common.config import NO_CREDENTIALS, ClientCredentials
from multiworld_serving.common.threads import thread_while
from multiworld_serving.testing.load.requests import ReferenceRequest
from multiworld_serving.testing.load.statistics import quantile

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

    def between(self, since_s: float, until_s: float) -> list[Sample]:
        """Return the requests that were in flight at some time of the interval."""
        return [sample for sample in self.samples if sample.done_s >= since_s and sample.sent_s <= until_s]

    def quantile_s(self, share: float) -> float:
        """Return a quantile of the latency of all requests; NaN if there were none."""
        return quantile([sample.took_s for sample in self.samples], share)


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


async def closed_loop(
    url: str,
    requests: Sequence[ReferenceRequest],
    *,
    clients: int,
    until: Callable[[], bool],
    load: Load | None = None,
    timeout_s: float = 120.0,
    credentials: ClientCredentials = NO_CREDENTIALS,
) -> Load:
    """Run clients that each send their next request after the previous answer, until `until()` is true."""
    load = Load() if load is None else load
    numbers = itertools.count()
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(limits=limits, timeout=timeout_s, **credentials.options) as http:

        async def one() -> None:
            while not until():
                number = next(numbers)
                sample = await send(http, url, requests[number % len(requests)], f"chaos-{number}")
                load.samples.append(sample)
                if not sample.status:  # no connection: do not retry a thousand times per second
                    await asyncio.sleep(_UNREACHABLE_PAUSE_S)

        await asyncio.gather(*(one() for _ in range(clients)))
    return load


async def open_loop(
    url: str,
    requests: Sequence[ReferenceRequest],
    *,
    rate_hz: float,
    until: Callable[[], bool],
    load: Load | None = None,
    timeout_s: float = 120.0,
    seed: int = 0,
    credentials: ClientCredentials = NO_CREDENTIALS,
) -> Load:
    """Send requests at random times (Poisson, `rate_hz` per second), independent of the answers, until `until()` is true."""
    load = Load() if load is None else load
    generator, due_s = random.Random(seed), time.perf_counter()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with (
        httpx.AsyncClient(limits=limits, timeout=timeout_s, **credentials.options) as http,
        asyncio.TaskGroup() as tasks,
    ):
        in_flight: set[asyncio.Task[None]] = set()

        async def one(number: int, due_s: float) -> None:
            late_s = (
                time.perf_counter() - due_s
            )  # count the delay of this event loop as latency: load on the service may cause it
            sample = await send(http, url, requests[number % len(requests)], f"chaos-{number}")
            load.samples.append(replace(sample, sent_s=sample.sent_s - late_s, took_s=sample.took_s + late_s))

        for number in itertools.count():
            due_s += generator.expovariate(rate_hz)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            if until():
                break
            if len(in_flight) < _MAX_OPEN:
                task = tasks.create_task(one(number, due_s))
                in_flight.add(task)
                task.add_done_callback(in_flight.discard)
            else:
                load.unsent += 1
    return load


@contextmanager
def run_load(
    url: str,
    requests: Sequence[ReferenceRequest],
    *,
    clients: int = 8,
    rate_hz: float | None = None,
    timeout_s: float = 120.0,
    seed: int = 0,
    credentials: ClientCredentials = NO_CREDENTIALS,
) -> Iterator[Load]:
    """Run a load in a background thread while the block runs; at its end, waits for all requests in flight.

    Args:
        rate_hz: requests per second of an open loop; None runs `clients` in a closed loop.
    """
    load = Load()
    common: dict[str, Any] = {"load": load, "timeout_s": timeout_s, "credentials": credentials}

    def run(over: threading.Event) -> None:
        if rate_hz:
            asyncio.run(open_loop(url, requests, rate_hz=rate_hz, seed=seed, until=over.is_set, **common))
        else:
            asyncio.run(closed_loop(url, requests, clients=clients, until=over.is_set, **common))

    with thread_while(run, "chaos-load"):
        yield load
