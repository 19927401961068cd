"""Short jobs on the event loop run one after the other, and each gives its result to its own request."""

import asyncio
from functools import partial

import pytest

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
