"""Clients over HTTP, in a closed loop or at a rate, that check every answer."""

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

from chaos.statistics import quantile
from config import NOTHING, Access

_TOLERANCE = 1e-2
"""Of a probability. The same image in batches of other sizes differs by 1e-6 to 1e-4; another image by far more."""
_MAX_OPEN = 4096
"""Requests that an open loop has under way at the most: beyond it, the service is not worth asking any more."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Times on the clock of `time.time()`."""

    sent_s: float
    took_s: float
    status: int
    """0 when there was no answer at all."""
    error: str = ""
    """What was wrong; empty when the answer was right."""

    @property
    def done_s(self) -> float:
        return self.sent_s + self.took_s

    @property
    def refused(self) -> bool:
        """Refused early because of too much load: what an open loop may be told."""
        return self.status == 429

    @property
    def failed(self) -> bool:
        return not self.refused and (self.status != 200 or bool(self.error))


@dataclass(slots=True)
class Load:
    """What came of it all, in the order of the answers.

    Attributes:
        unsent: requests of an open loop that were not sent, because too many were under way already.
    """

    samples: list[Sample] = field(default_factory=list)
    unsent: int = 0

    @property
    def failed(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.failed]

    def between(self, since_s: float, until_s: float) -> list[Sample]:
        """The requests that were under way at some moment of that time."""
        return [sample for sample in self.samples if sample.done_s >= since_s and sample.sent_s <= until_s]

    def quantile_s(self, share: float) -> float:
        """A quantile of the latency of all; not-a-number when there were none."""
        return quantile([sample.took_s for sample in self.samples], share)


@dataclass(frozen=True, slots=True)
class Question:
    """An image, and what a service that nobody disturbs says of it.

    Attributes:
        expected: probabilities by class; empty when any answer will do.
        path: where it is asked.
    """

    body: bytes
    content_type: str = "image/jpeg"
    expected: dict[int, float] = field(default_factory=dict)
    path: str = "/predict"

    @property
    def headers(self) -> dict[str, str]:
        """Those that go with the body."""
        return {"content-type": self.content_type}

    def complaint(self, answer: httpx.Response, request_id: str) -> str:
        """Why this is not the answer to this question, asked under this id; empty when it is."""
        if answer.status_code != 200:
            return answer.text[:200]
        try:
            said = answer.json()
            if said["id"] != request_id:
                return f"the answer of another request: {said['id']}"
            return self.wrong(said)
        except (ValueError, KeyError, TypeError) as error:
            return f"not an answer: {error!r}"

    def wrong(self, answer: dict[str, Any]) -> str:
        """Why this answer is not the one for this image; empty when it is."""
        found = {int(p["class_id"]): float(p["probability"]) for p in answer["predictions"]}
        floor = min(found.values(), default=0.0)
        for class_id, probability in self.expected.items():
            # Two classes that are equally probable may change places, and one may drop out at the lower end.
            other = found.get(class_id, floor)
            if abs(other - probability) > _TOLERANCE * max(probability, 1e-6):
                return f"wrong answer: class {class_id} has {other:.6g}, a quiet service says {probability:.6g}"
        return ""


def ask_quietly(
    url: str, images: Sequence[tuple[bytes, str]], timeout_s: float = 60.0, way_in: Access = NOTHING
) -> list[Question]:
    """Ask about each image alone, to know the right answers. Raises httpx.HTTPError when one is not answered."""
    questions = []
    with httpx.Client(timeout=timeout_s, **way_in.options) as client:
        for body, content_type in images:
            response = client.post(f"{url}/predict", content=body, headers={"content-type": content_type})
            response.raise_for_status()
            predictions = response.json()["predictions"]
            expected = {int(p["class_id"]): float(p["probability"]) for p in predictions}
            questions.append(Question(body, content_type, expected))
    return questions


def alike(questions: Sequence[Question]) -> int:
    """How many pairs of images have answers that could be taken for each other, so that a mix-up would go unseen."""

    def says(question: Question) -> dict[str, Any]:
        return {"predictions": [{"class_id": c, "probability": p} for c, p in question.expected.items()]}

    return sum(not one.wrong(says(other)) for one, other in itertools.combinations(questions, 2))


async def ask(client: httpx.AsyncClient, url: str, question: Question, request_id: str) -> Sample:
    """One request and its check. Never raises for what the service or the network does."""
    headers = question.headers | {"x-request-id": request_id}
    sent_s, started_s = time.time(), time.perf_counter()
    try:
        answer = await client.post(url + question.path, content=question.body, headers=headers)
        took_s = time.perf_counter() - started_s
        return Sample(sent_s, took_s, answer.status_code, question.complaint(answer, request_id))
    except httpx.HTTPError as error:
        return Sample(sent_s, time.perf_counter() - started_s, 0, repr(error))


async def closed_loop(
    url: str,
    questions: Sequence[Question],
    *,
    clients: int,
    until: Callable[[], bool],
    load: Load | None = None,
    timeout_s: float = 120.0,
    way_in: Access = NOTHING,
) -> Load:
    """Each client sends its next request when its last one was answered, until `until()` is true."""
    load = Load() if load is None else load
    numbers = itertools.count()
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(limits=limits, timeout=timeout_s, **way_in.options) as http:

        async def one() -> None:
            while not until():
                number = next(numbers)
                load.samples.append(await ask(http, url, questions[number % len(questions)], f"chaos-{number}"))

        await asyncio.gather(*(one() for _ in range(clients)))
    return load


async def open_loop(
    url: str,
    questions: Sequence[Question],
    *,
    rate_hz: float,
    until: Callable[[], bool],
    load: Load | None = None,
    timeout_s: float = 120.0,
    seed: int = 0,
    way_in: Access = NOTHING,
) -> Load:
    """Requests come as they please, `rate_hz` a second on average (Poisson), whether or not earlier ones are answered."""
    load = Load() if load is None else load
    generator, due_s = random.Random(seed), time.perf_counter()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with (
        httpx.AsyncClient(limits=limits, timeout=timeout_s, **way_in.options) as http,
        asyncio.TaskGroup() as tasks,
    ):
        under_way: set[asyncio.Task[None]] = set()

        async def one(number: int, due_s: float) -> None:
            late_s = time.perf_counter() - due_s  # of our own making, but the service may have caused it
            sample = await ask(http, url, questions[number % len(questions)], f"chaos-{number}")
            load.samples.append(replace(sample, sent_s=sample.sent_s - late_s, took_s=sample.took_s + late_s))

        for number in itertools.count():
            due_s += generator.expovariate(rate_hz)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            if until():
                break
            if len(under_way) < _MAX_OPEN:
                task = tasks.create_task(one(number, due_s))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
            else:
                load.unsent += 1
    return load


@contextmanager
def load_on(
    url: str,
    questions: Sequence[Question],
    *,
    clients: int = 8,
    rate_hz: float | None = None,
    timeout_s: float = 120.0,
    seed: int = 0,
    way_in: Access = NOTHING,
) -> Iterator[Load]:
    """Clients in a thread of their own while the block runs; every request has its answer after it.

    Args:
        rate_hz: requests a second of an open loop; None runs `clients` in a closed one.
    """
    over, load = threading.Event(), Load()
    common: dict[str, Any] = {"until": over.is_set, "load": load, "timeout_s": timeout_s, "way_in": way_in}

    def run() -> None:
        if rate_hz:
            asyncio.run(open_loop(url, questions, rate_hz=rate_hz, seed=seed, **common))
        else:
            asyncio.run(closed_loop(url, questions, clients=clients, **common))

    thread = threading.Thread(target=run, name="chaos-load")
    thread.start()
    try:
        yield load
    finally:
        over.set()
        thread.join()
