"""A closed loop of clients over HTTP: each sends its next request when the last one was answered."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Times on the clock of `time.time()`."""

    sent_s: float
    took_s: float
    status: int
    """0 when there was no answer at all."""
    error: str = ""


@dataclass(slots=True)
class Load:
    """What came of it all."""

    samples: list[Sample] = field(default_factory=list)

    @property
    def failed(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.status != 200]

    def quantile_s(self, share: float, since_s: float = 0.0, until_s: float = float("inf")) -> float:
        """A quantile of the latency of requests that were under way in that time; not-a-number when there were none."""
        times = sorted(s.took_s for s in self.samples if s.sent_s + s.took_s >= since_s and s.sent_s <= until_s)
        return times[min(len(times) - 1, int(share * len(times)))] if times else float("nan")


async def closed_loop(
    url: str, body: bytes, *, clients: int, until: Callable[[], bool], content_type: str = "image/jpeg"
) -> Load:
    """Send until `until()` is true, checked before every request."""
    load = Load()
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(limits=limits, timeout=120.0) as client:

        async def one() -> None:
            while not until():
                sent_s, started_s = time.time(), time.perf_counter()
                try:
                    answer = await client.post(f"{url}/predict", content=body, headers={"content-type": content_type})
                    sample = Sample(sent_s, time.perf_counter() - started_s, answer.status_code, answer.text[:200])
                except httpx.HTTPError as error:
                    sample = Sample(sent_s, time.perf_counter() - started_s, 0, repr(error))
                load.samples.append(sample)

        await asyncio.gather(*(one() for _ in range(clients)))
    return load
