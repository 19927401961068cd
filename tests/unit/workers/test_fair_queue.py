"""Which leader's job runs next."""

import pytest

from multiworld_serving.workers.compute.fair_queue import FairQueue


def served_s(queue: FairQueue[str, float], jobs: int) -> dict[str, float]:
    """Run this many jobs, each of which takes as many seconds as its number says. Returns the time of each owner."""
    times_s: dict[str, float] = {}
    for _ in range(jobs):
        owner, job_s = queue.take()
        queue.charge(owner, job_s)
        times_s[owner] = times_s.get(owner, 0.0) + job_s
    return times_s


def test_owners_get_equal_times_when_their_jobs_differ_in_number_and_duration() -> None:
    queue: FairQueue[str, float] = FairQueue()
    for _ in range(200):
        queue.add("flood of large batches", 8.0)
    for _ in range(80):
        queue.add("small batches", 1.0)
    times_s = served_s(queue, 89)
    assert times_s["small batches"] == pytest.approx(times_s["flood of large batches"], abs=8.0)


def test_owner_waits_for_at_most_one_job_of_each_other_owner() -> None:
    queue: FairQueue[str, float] = FairQueue()
    for owner in ("a", "b"):
        for _ in range(20):
            queue.add(owner, 1.0)
    served_s(queue, 11)
    queue.add("late", 1.0)
    assert "late" in served_s(queue, 3)


def test_idle_owner_saves_no_time_up() -> None:
    queue: FairQueue[str, float] = FairQueue()
    queue.add("idle", 1.0)
    for _ in range(40):
        queue.add("busy", 1.0)
    served_s(queue, 20)
    for _ in range(20):
        queue.add("idle", 1.0)
    assert served_s(queue, 10) == {"idle": 5.0, "busy": 5.0}


def test_jobs_that_are_not_charged_take_turns() -> None:
    queue: FairQueue[str, str] = FairQueue()
    for job in range(3):
        queue.add("a", f"a{job}")
    queue.add("b", "b0")
    assert [queue.take()[1] for _ in range(4)] == ["a0", "b0", "a1", "a2"]
    assert len(queue) == 0


def test_removed_owner_has_no_jobs() -> None:
    queue: FairQueue[str, float] = FairQueue()
    queue.add("gone", 1.0)
    queue.remove("gone")
    queue.charge("gone", 5.0)
    queue.add("b", 1.0)
    assert not queue.has_jobs("gone")
    assert queue.take() == ("b", 1.0)
