"""Short jobs on the event loop run one after the other, and each gives its result to its own request."""

import asyncio
import contextlib
import gc
import weakref
from functools import partial

import pytest

from multiworld_serving.server.frontend.api import short_jobs
from multiworld_serving.server.frontend.api.short_jobs import ShortJobs


async def test_jobs_of_one_turn_run_together_and_their_results_are_not_mixed_up() -> None:
    jobs, steps = ShortJobs(), list[str]()

    def job(number: int) -> int:
        steps.append(f"runs {number}")
        return number

    async def request(number: int) -> int:
        steps.append(f"asks {number}")
        found = await jobs.run(partial(job, number))
        steps.append(f"has {found}")
        return found

    assert await asyncio.gather(*map(request, range(3))) == [0, 1, 2]
    assert steps == [f"{step} {number}" for step in ("asks", "runs", "has") for number in range(3)]
    assert await request(3) == 3


async def test_error_and_cancelled_request_do_not_disturb_other_jobs() -> None:
    jobs, ran = ShortJobs(), list[str]()

    def fail() -> None:
        raise ValueError("damaged")

    failing, cancelled, last = jobs.run(fail), jobs.run(lambda: ran.append("cancelled")), jobs.run(lambda: "done")
    cancelled.cancel()
    with pytest.raises(ValueError, match="damaged"):
        await failing
    assert await last == "done"
    assert ran == []


async def test_more_jobs_than_run_together_run_in_the_next_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_jobs, "_TOGETHER", 2)
    jobs, ran = ShortJobs(), list[int]()
    results = [jobs.run(partial(ran.append, number)) for number in range(5)]
    await results[1]
    assert ran == [0, 1]
    await asyncio.gather(*results)
    assert ran == list(range(5))


async def test_failed_job_keeps_nothing_in_memory() -> None:
    class Body(list[str]):
        """Can be referenced weakly."""

        def decode(self) -> str:
            return self[0]

    jobs, bodies = ShortJobs(), [Body(["good"]), Body(), Body(["good"])]
    kept = [weakref.ref(body) for body in bodies]
    gc.disable()
    try:
        results = [jobs.run(body.decode) for body in bodies]
        bodies.clear()
        while results:
            with contextlib.suppress(IndexError):
                await results.pop()
        assert [each() for each in kept] == [None, None, None]
    finally:
        gc.enable()
