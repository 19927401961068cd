"""Workers of one machine share its cores: a worker that computes alone uses all of them."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from multiworld_serving.workers.compute.cores import BatchThreads, SharedCores

_COMPUTES = """
import sys
from multiworld_serving.workers.compute.cores import SharedCores
with SharedCores(sys.argv[1], int(sys.argv[2]), 4, 4, lambda: 0.0).acquire_cores() as threads:
    print(threads, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "cores"
    path.touch()
    return str(path)


@contextmanager
def computing(file: str, seat: int) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Another process that computes, and its number of threads."""
    command = [sys.executable, "-c", _COMPUTES, file, str(seat)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def idle() -> float:
    """What other programs compute on an idle machine."""
    return 0.0


def threads(shared: SharedCores) -> int:
    with shared.acquire_cores() as count:
        return count


def test_cores_are_shared_equally_when_others_compute(file: str) -> None:
    shared = SharedCores(file, 0, 4, 4, idle)
    with computing(file, 1), computing(file, 3) as (_, of_the_second):
        assert of_the_second == 2
        assert threads(shared) == 1  # of three: 4 // 3
        with shared.acquire_cores(), computing(file, 2) as (_, of_the_fourth):
            assert of_the_fourth == 1


def test_cores_are_released_when_a_worker_has_computed_or_is_killed(file: str) -> None:
    shared = SharedCores(file, 0, 4, 4, idle)
    assert threads(shared) == 4
    with computing(file, 1) as (process, theirs):
        assert theirs == 4
        assert threads(shared) == 2
        process.kill()
        process.wait(60)
        assert threads(SharedCores(file, 0, 4, 4, idle)) == 4


def test_batch_is_computed_when_all_slots_are_taken(file: str) -> None:
    shared = SharedCores(file, 1, 4, 4, idle)
    with computing(file, 1):
        assert threads(shared) == 4


@pytest.mark.parametrize(("used", "expected"), [(0.3, 4), (1.0, 3), (1.5, 2), (3.5, 1), (9.0, 1)])
def test_cores_that_other_programs_use_are_left_to_them(
    file: str, used: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "clock_gettime", lambda _: 1.5 * now_s)  # of this worker
    shared = SharedCores(file, 0, 1, 4, lambda: (1.5 + used) * now_s)
    now_s += 0.9
    assert threads(shared) == expected


def test_all_cores_count_as_free_after_a_pause(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    shared = SharedCores(file, 0, 1, 4, lambda: 3.5 * now_s)  # of other programs
    with shared.acquire_cores():
        now_s += 2.0  # a slow batch
    assert threads(shared) == 1
    now_s += 1.5
    assert threads(shared) == 4


def test_one_thread_computes_the_batches_for_which_it_is_faster(file: str) -> None:
    shared, threads_of = SharedCores(file, 0, 1, 4, idle), BatchThreads("one", "share")
    taken = []
    for rows in (1, 8):
        with shared.acquire_cores(threads_of.of(rows)) as count:
            taken.append(count)
    assert taken == [1, 4]


def test_successor_knows_what_was_measured_for_a_stage(file: str) -> None:
    stage, same_place, threads_of = bytes(32), bytes(31) + b"1", BatchThreads("one", "share")
    SharedCores(file, 0, 2, 4, idle).remember(stage, threads_of)
    successor = SharedCores(file, 1, 2, 4, idle)
    assert successor.recall(stage) == threads_of
    assert successor.recall(same_place) is successor.recall(b"2" * 32) is None
    with computing(file, 0):
        assert threads(successor) == 2


def test_sharing_is_refused_when_the_file_is_gone(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        SharedCores(str(tmp_path / "nowhere"), 0, 2, 2)
