"""Workers change places, and the model is cut into other stages, and no request fails."""

import contextlib
import subprocess
from pathlib import Path

import pytest

from multiworld_serving.testing.load.clients import record_reference_answers
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService, LogLine
from tests.chaos.clients import TOKEN, assert_nothing_lost, external_worker, run_load
from tests.services import service_for_workers
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)
WAIT_S = 120.0


def workers(service: LocalService) -> list[list[str]]:
    return [sorted(replica["worker"] for replica in stage["replicas"]) for stage in service.status()["stages"]]


def wait_for(service: LocalService, worker: str, words: str, after: int) -> None:
    service.wait_for(lambda line: line["worker"] == worker and words in line.message, WAIT_S, after=after)


def test_workers_are_exchanged_under_load_without_a_failed_request(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(service_for_workers(file, stages=2, replicas=2, rebalance_after_s=3))
        for name, gflops in (("fast-1", 100), ("slow-1", 10), ("fast-2", 100), ("slow-2", 10)):
            options = ["--gflops", str(gflops), "--advertise-host", f"host-of-{name}"]
            stack.enter_context(external_worker(service.join_address, name=name, options=options))
            wait_for(service, name, "joining", 0)
        service.wait_until_complete(WAIT_S)
        assert workers(service) == [["fast-1", "fast-2"], ["slow-1", "slow-2"]]
        seen = len(service.lines)
        with run_load(service) as load:
            told = service.wait_for(lambda line: "exchanging" in line.message, WAIT_S, after=seen)
            assert told.message.startswith("stage=1 is the slowest: exchanging its worker=slow-1 with worker=fast-1")
            for worker in ("fast-1", "slow-1"):
                wait_for(service, worker, "->ready", seen)
        assert_nothing_lost(service, load)
        assert workers(service) == [["fast-2", "slow-1"], ["fast-1", "slow-2"]]
        assert service.metric("multiworld_world_failures_total") == 0


def blocks(service: LocalService) -> list[list[str]]:
    return [stage["blocks"] for stage in service.status()["stages"]]


def wait_for_cuts(service: LocalService, after: int) -> list[str]:
    """Wait until both leaders have other stages. Returns where they cut."""
    cuts: dict[str, str] = {}

    def cut(line: LogLine) -> bool:
        if "has other stages" in line.message:
            cuts[line["process"]] = line.message
        return len(cuts) == 2

    service.wait_for(cut, WAIT_S, after=after)
    return list(cuts.values())


def test_model_is_cut_for_the_workers_that_are_left_and_again_when_one_returns(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(
            service_for_workers(file, stages=2, replicas=2, leaders=2, frontends=2, rebalance_after_s=1.5)
        )
        leaders = [leader["address"] for leader in service.status()["leaders"]]
        assert len(leaders) == 2
        before = blocks(service)

        def start(name: str) -> "subprocess.Popen[bytes]":
            return stack.enter_context(external_worker(*leaders, name=name))

        processes = {name: start(name) for name in ("first", "second", "third", "fourth")}
        service.wait_until_complete(WAIT_S)
        wait_until(lambda: blocks(service) == before)
        questions = record_reference_answers(service.url, [(photo(seed), "image/jpeg") for seed in range(4)])
        with run_load(service, questions=questions) as load:
            seen = len(service.lines)
            processes[workers(service)[1][0]].kill()
            first, second = wait_for_cuts(service, seen)
            assert first == second
            assert blocks(service) != before
            seen = len(service.lines)
            start("fifth")
            first, second = wait_for_cuts(service, seen)
            assert first == second
        assert blocks(service) == before
        assert_nothing_lost(service, load)
