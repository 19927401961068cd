"""A queue does its jobs in order, holds no thread when idle, and ends with its world."""

import threading
from functools import partial

import pytest

from multiworld.execution.blocking_pool import BlockingPool
from multiworld.execution.serial_queue import SerialQueue

PATIENCE_S = 30.0


def _pass(gate: threading.Event) -> None:
    assert gate.wait(PATIENCE_S)


def test_jobs_run_in_order_when_the_first_is_slow() -> None:
    pool = BlockingPool("test")
    queue, gate, last = SerialQueue(pool), threading.Event(), threading.Event()
    done: list[int] = []
    queue.run(partial(_pass, gate))
    queue.run(partial(done.append, 0))
    for job in range(1, 50):
        queue.run(partial(done.append, job))
    queue.run(last.set)
    assert queue._running
    assert done == []
    gate.set()
    assert last.wait(PATIENCE_S)
    assert done == list(range(50))
    assert pool.close(PATIENCE_S)
    assert not queue._running


def test_lanes_of_a_world_do_not_wait_for_each_other() -> None:
    pool = BlockingPool("test")
    first, second, gate, done = SerialQueue(pool), SerialQueue(pool), threading.Event(), threading.Event()
    first.run(partial(_pass, gate))
    second.run(done.set)
    assert done.wait(PATIENCE_S)
    gate.set()
    assert pool.close(PATIENCE_S)


def test_job_is_refused_when_the_world_has_ended() -> None:
    pool = BlockingPool("test")
    queue = SerialQueue(pool)
    assert pool.close(PATIENCE_S)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            queue.run(lambda: None)
        assert not queue._running


def test_later_jobs_run_when_one_raises() -> None:
    raised: list[BaseException] = []
    pool = BlockingPool("test", raised.append)
    queue, done = SerialQueue(pool), threading.Event()
    failures = [MemoryError(), ValueError("refused"), SystemExit(1)]

    def fail(error: BaseException) -> None:
        raise error

    for failure in failures:
        queue.run(partial(fail, failure))
    queue.run(done.set)
    assert done.wait(PATIENCE_S)
    assert raised == failures
    assert pool.close(PATIENCE_S)
    assert not queue._running
