"""Workers of one machine share its cores: a worker that computes alone uses all of them."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from multiworld_serving.workers.compute.cores import BatchThreads, SharedCores

_COMPUTES = """
import sys
from multiworld_serving.workers.compute.cores import SharedCores
with SharedCores(sys.argv[1], int(sys.argv[2]), 4, 4, lambda: 0.5).acquire_cores() as threads:
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


def threads(cores: SharedCores) -> int:
    with cores.acquire_cores() as count:
        return count


def test_all_cores_are_used_when_no_other_worker_computes(file: str) -> None:
    assert threads(SharedCores(file, 0, 4, 4, lambda: 0.5)) == 4
    with computing(file, 1) as (_, theirs):
        assert theirs == 4
    assert threads(SharedCores(file, 0, 4, 4, lambda: 0.5)) == 4


def test_cores_are_shared_equally_when_others_compute(file: str) -> None:
    cores = SharedCores(file, 0, 4, 4, lambda: 0.5)
    with computing(file, 1), computing(file, 3) as (_, of_the_second):
        assert of_the_second == 2
        assert threads(cores) == 1  # of three: 4 // 3
        with cores.acquire_cores(), computing(file, 2) as (_, of_the_fourth):
            assert of_the_fourth == 1


def test_each_worker_has_one_thread_when_there_are_more_workers_than_cores(file: str) -> None:
    cores = SharedCores(file, 0, 4, 2, lambda: 0.5)
    with computing(file, 1), computing(file, 2), computing(file, 3):
        assert threads(cores) == 1


def test_cores_are_released_when_a_computing_worker_is_killed(file: str) -> None:
    cores = SharedCores(file, 0, 4, 4, lambda: 0.5)
    with computing(file, 1) as (process, _):
        assert threads(cores) == 2
        process.kill()
        process.wait(60)
        assert threads(SharedCores(file, 0, 4, 4, lambda: 0.5)) == 4


def test_batch_is_computed_when_all_slots_are_taken(file: str) -> None:
    cores = SharedCores(file, 1, 4, 4, lambda: 0.5)
    with computing(file, 1):
        assert threads(cores) == 4


def test_share_is_at_most_equal_when_other_programs_use_the_machine(file: str) -> None:
    assert threads(SharedCores(file, 0, 2, 4, lambda: 2.5)) == 2
    assert threads(SharedCores(file, 0, 8, 4, lambda: 2.5)) == 1


@pytest.mark.parametrize(("load", "expected"), [(0.5, (1, 4, 4)), (1.5, (1, 1, 4))])
def test_small_batches_use_one_thread_when_it_is_faster_or_no_core_is_idle(
    file: str, load: float, expected: tuple[int, ...]
) -> None:
    cores, threads_of = SharedCores(file, 0, 1, 4, lambda: load), BatchThreads("one", "idle")
    taken = []
    for use in (threads_of.of(1), threads_of.of(8), BatchThreads().of(8)):
        with cores.acquire_cores(use) as count:
            taken.append(count)
    assert tuple(taken) == expected


def test_sharing_is_refused_when_the_file_is_gone(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        SharedCores(str(tmp_path / "nowhere"), 0, 2, 2)
