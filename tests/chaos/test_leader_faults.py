"""The leader is killed: workers from outside live on, and join the next one by themselves."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.kill_under_load import photo
from benchmarks.load import closed_loop
from deploy.service import LocalService

pytestmark = pytest.mark.timeout(300)

TOKEN = "a-secret-of-this-test"


@contextlib.contextmanager
def external_worker(leader: str, name: str) -> Iterator[subprocess.Popen[bytes]]:
    worker = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "worker", "--leader", leader, "--name", name, "--threads", "1"],
        env={**os.environ, "MULTIWORLD_TOKEN": TOKEN},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield worker
    finally:
        worker.terminate()
        assert worker.wait(60) == 0, "SIGTERM ends a worker with status 0"


def leader(token_file: Path, join_port: int) -> LocalService:
    return LocalService(
        wait_until_ready=False,
        external_workers=True,
        token_file=token_file,
        join_port=join_port,
        model="resnet18",
        weights="random:0",
        image_size=32,
        stages=2,
        replicas=1,
    )


def answers(service: LocalService) -> list[int]:
    left = iter(range(3))
    load = asyncio.run(closed_loop(service.url, photo(), clients=1, until=lambda: next(left, None) is None))
    return [sample.status for sample in load.samples]


def test_workers_join_the_next_leader_by_themselves_when_theirs_is_killed(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(leader(token_file, 0))
        workers = [stack.enter_context(external_worker(first.join_address, name)) for name in ("a", "b")]
        first.wait_until_complete(120)
        assert answers(first) == [200, 200, 200]
        first.stop(signal.SIGKILL)
        second = stack.enter_context(leader(token_file, int(first.join_address.rpartition(":")[2])))
        status = second.wait_until_complete(120)
        assert {replica["worker"] for stage in status["stages"] for replica in stage["replicas"]} == {"a", "b"}
        assert answers(second) == [200, 200, 200]
        assert all(worker.poll() is None for worker in workers), "the very same processes"
