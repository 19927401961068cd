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
from multiworld_serving.testing.load.statistics import quantile

_TOLERANCE = 1e-2
"""Relative tolerance of probabilities. Batch sizes change them by 1e-6 to 1e-4; another image by far more."""
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


@dataclass(frozen=True, slots=True)
class ReferenceRequest:
    """A request with its expected answer, as recorded from the service without load or faults.

    Attributes:
        expected: probability by class; empty accepts any answer.
        path: URL path.
    """

    body: bytes
    content_type: str = "image/jpeg"
    expected: dict[int, float] = field(default_factory=dict)
    path: str = "/predict"

    @property
    def headers(self) -> dict[str, str]:
        """Headers that describe the body."""
        return {"content-type": self.content_type}

    def find_error(self, answer: httpx.Response, request_id: str) -> str:
        """Return why this is not a correct response to the request with this id; empty if it is."""
        if answer.status_code != 200:
            return answer.text[:200]
        try:
            answer_json = answer.json()
            if answer_json["id"] != request_id:
                return f"the answer of another request: {answer_json['id']}"
            return self.find_mismatch(answer_json)
        except (ValueError, KeyError, TypeError) as error:
            return f"not an answer: {error!r}"

    def find_mismatch(self, answer: dict[str, Any]) -> str:
        """Return how this answer differs from the expected one; empty if it does not."""
        found = {int(p["class_id"]): float(p["probability"]) for p in answer["predictions"]}
        floor = min(found.values(), default=0.0)
        for class_id, probability in self.expected.items():
            # Classes with nearly equal probabilities may swap ranks, so the last one may be missing.
            other = found.get(class_id, floor)
            if abs(other - probability) > _TOLERANCE * max(probability, 1e-6):
                return f"wrong answer: class {class_id} has probability {other:.6g}, expected {probability:.6g}"
        return ""


def record_reference_answers(
    url: str,
    images: Sequence[tuple[bytes, str]],
    timeout_s: float = 60.0,
    credentials: ClientCredentials = NO_CREDENTIALS,
) -> list[ReferenceRequest]:
    """Send each image alone and record the answers as expected. Raises httpx.HTTPError if a request fails."""
    requests = []
    with httpx.Client(timeout=timeout_s, **credentials.options) as client:
        for body, content_type in images:
            response = client.post(f"{url}/predict", content=body, headers={"content-type": content_type})
            response.raise_for_status()
            predictions = response.json()["predictions"]
            expected = {int(p["class_id"]): float(p["probability"]) for p in predictions}
            requests.append(ReferenceRequest(body, content_type, expected))
    return requests


def count_indistinguishable(requests: Sequence[ReferenceRequest]) -> int:
    """Count pairs of requests whose answers are equal within the tolerance: swapping them would not be detected."""

    def says(request: ReferenceRequest) -> dict[str, Any]:
        return {"predictions": [{"class_id": c, "probability": p} for c, p in request.expected.items()]}

    return sum(not one.find_mismatch(says(other)) for one, other in itertools.combinations(requests, 2))


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
