"""A serial queue runs its jobs in order, holds no thread while idle, and ends with its world."""

import threading
from functools import partial

import pytest

from multiworld.execution.blocking_pool import BlockingPool
from multiworld.execution.serial_queue import SerialQueue

PATIENCE_S = 30.0


def _pass(gate: threading.Event) -> None:
    assert gate.wait(PATIENCE_S)


def test_jobs_run_in_order_when_the_first_is_slow() -> None:
    waiters = BlockingPool("test")
    lane, gate, last = SerialQueue(waiters), threading.Event(), threading.Event()
    done: list[int] = []
    lane.run(partial(_pass, gate))
    lane.run(partial(done.append, 0))
    for job in range(1, 50):
        lane.run(partial(done.append, job))
    lane.run(last.set)
    assert lane._running
    assert done == []
    gate.set()
    assert last.wait(PATIENCE_S)
    assert done == list(range(50))
    assert waiters.close(PATIENCE_S)
    assert not lane._running


def test_queues_of_a_world_do_not_wait_for_each_other() -> None:
    waiters = BlockingPool("test")
    first, second, gate, done = SerialQueue(waiters), SerialQueue(waiters), threading.Event(), threading.Event()
    first.run(partial(_pass, gate))
    second.run(done.set)
    assert done.wait(PATIENCE_S)
    gate.set()
    assert waiters.close(PATIENCE_S)


def test_job_is_refused_when_the_world_has_ended() -> None:
    waiters = BlockingPool("test")
    lane = SerialQueue(waiters)
    assert waiters.close(PATIENCE_S)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            lane.run(lambda: None)
        assert not lane._running


def test_later_jobs_run_when_one_raises() -> None:
    raised: list[BaseException] = []
    waiters = BlockingPool("test", raised.append)
    lane, done = SerialQueue(waiters), threading.Event()
    failures = [MemoryError(), ValueError("refused"), SystemExit(1)]

    def fail(error: BaseException) -> None:
        raise error

    for failure in failures:
        lane.run(partial(fail, failure))
    lane.run(done.set)
    assert done.wait(PATIENCE_S)
    assert raised == failures
    assert waiters.close(PATIENCE_S)
    assert not lane._running
