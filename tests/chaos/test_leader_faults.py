"""A leader is killed: external workers stay alive, serve their other leader, and join the restarted one by themselves."""

import contextlib
import signal
from pathlib import Path

import pytest

from multiworld_serving.testing.local_service import LocalService
from tests.chaos.clients import TOKEN, answers, assert_nothing_lost, external_worker, run_load
from tests.services import service_for_workers

pytestmark = pytest.mark.timeout(300)


def leader(token_file: Path, join_port: int) -> LocalService:
    return service_for_workers(token_file, join_port=join_port, stages=2)


def test_workers_join_the_next_leader_when_theirs_is_killed(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(leader(token_file, 0))
        workers = [stack.enter_context(external_worker(first.join_address, name=name)) for name in "ab"]
        first.wait_until_complete(120)
        assert answers(first) == [200, 200, 200]
        first.stop(signal.SIGKILL)
        second = stack.enter_context(leader(token_file, int(first.join_address.rpartition(":")[2])))
        status = second.wait_until_complete(120)
        assert {replica["worker"] for stage in status["stages"] for replica in stage["replicas"]} == {"a", "b"}
        assert answers(second) == [200, 200, 200]
        assert all(worker.poll() is None for worker in workers), "the same processes"


def test_worker_of_two_leaders_serves_one_while_the_other_is_down_and_rejoins_it(
    tmp_path: Path,
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(leader(token_file, 0)) for _ in range(2))
        workers = [
            stack.enter_context(external_worker(first.join_address, second.join_address, name=name)) for name in "ab"
        ]
        for each in (first, second):
            each.wait_until_complete(120)
        with run_load(first) as one, run_load(second) as other:
            assert answers(first) == answers(second) == [200, 200, 200]
        assert not one.failed
        assert not other.failed
        with run_load(second) as load:
            first.stop(signal.SIGKILL)
            again = stack.enter_context(leader(token_file, int(first.join_address.rpartition(":")[2])))
            again.wait_until_complete(120)
            assert answers(again) == [200, 200, 200]
        assert_nothing_lost(second, load)
        assert second.metric("multiworld_world_failures_total") == 0
        assert all(worker.poll() is None for worker in workers), "the same processes"
