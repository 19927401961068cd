"""Every worker fault has a defined outcome and a cause in metrics and log, and costs no request while a replica is left."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from multiworld import ask
from multiworld_serving.common.wire import JoinOffer, JoinRequest
from multiworld_serving.testing.local_service import LocalService
from tests.chaos.clients import TOKEN, answers, assert_nothing_lost, external_worker, run_load
from tests.chaos.relay import Direction, Relay
from tests.services import service_for_workers

pytestmark = pytest.mark.timeout(300)

WAIT_S = 120.0
EMPTY = "s1.r1"
"""The slot that the three healthy workers leave to the worker of the test."""


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("access") / "token"
    path.write_text(TOKEN)
    return path


def leader(token_file: Path, **settings: Any) -> LocalService:
    return service_for_workers(token_file, **{"stages": 2, "replicas": 2, **settings})


@pytest.fixture(scope="module")
def service(token_file: Path) -> Iterator[LocalService]:
    """Two stages with two replicas each, served by three healthy workers."""
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(leader(token_file, hang_timeout_s=3))
        for name in ("sound-a", "sound-b", "sound-c"):
            stack.enter_context(external_worker(running.join_address, name=name))
            running.wait_for(lambda line, name=name: line["worker"] == name and "->ready" in line.message, WAIT_S)  # type: ignore[misc]
        yield running


@contextlib.contextmanager
def faulty(service: LocalService, fault: str) -> Iterator["subprocess.Popen[bytes]"]:
    with external_worker(service.join_address, name=f"worker-that-{fault}", fault=fault) as worker:
        yield worker


def ended(service: LocalService, worker: str, after: int, count: int = 1) -> list[str]:
    """The causes of this many ended links of this worker."""
    causes = []
    for _ in range(count):
        line = service.wait_for(lambda x: x["worker"] == worker and "->broken" in x.message, WAIT_S, after=after)
        causes.append(line["cause"])
        after = next(number for number, each in enumerate(service.lines) if each is line) + 1
    return causes


def assert_quarantined(service: LocalService, worker: str, after: int) -> None:
    service.wait_for(lambda x: x["worker"] == worker and "quarantined for" in x.message, WAIT_S, after=after)
    assert service.metric("multiworld_workers_quarantined") == 1


def states(service: LocalService) -> dict[str, str]:
    return {
        f"s{stage['index']}.r{replica['slot']}": replica["state"]
        for stage in service.status()["stages"]
        for replica in stage["replicas"]
    }


def test_worker_that_dies_on_every_batch_is_quarantined_and_costs_no_request(service: LocalService) -> None:
    name, seen = "worker-that-dies", len(service.lines)
    with run_load(service) as load:
        for _ in range(2):
            with faulty(service, "dies") as worker:
                assert worker.wait(WAIT_S) == -signal.SIGKILL
        assert ended(service, name, seen, 2) == ["exit", "exit"]
        assert_quarantined(service, name, seen)
    assert_nothing_lost(service, load)


def test_worker_that_hangs_in_the_model_is_broken_and_ends(service: LocalService) -> None:
    seen = len(service.lines)
    with run_load(service) as load, faulty(service, "hangs") as worker:
        assert ended(service, "worker-that-hangs", seen) == ["hang"]
        assert worker.wait(WAIT_S) == 70
    assert_nothing_lost(service, load)


def test_worker_with_a_blocked_event_loop_is_broken_as_stalled_and_costs_no_request(token_file: Path) -> None:
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(leader(token_file, stages=1, hang_timeout_s=600, hedge_factor=0))
        stack.enter_context(external_worker(service.join_address, name="sound"))
        service.wait_for(lambda x: x["worker"] == "sound" and "->ready" in x.message, WAIT_S)
        worker = stack.enter_context(faulty(service, "stalls"))
        service.wait_for(lambda x: x["worker"] == "worker-that-stalls" and "->ready" in x.message, WAIT_S)
        with run_load(service) as load:
            assert ended(service, "worker-that-stalls", 0) == ["stalled"]
            assert worker.poll() is None
        assert_nothing_lost(service, load)
        assert service.metric("multiworld_world_failures_total", cause="stalled") == 1
        assert worker.wait(WAIT_S) == 70


def test_worker_whose_stage_always_raises_is_broken_and_quarantined(service: LocalService) -> None:
    name, seen = "worker-that-raises", len(service.lines)
    with run_load(service) as load, faulty(service, "raises"):
        assert ended(service, name, seen, 2) == ["error", "error"]
        assert_quarantined(service, name, seen)
    assert_nothing_lost(service, load)


def test_worker_out_of_memory_is_broken_and_ends(service: LocalService) -> None:
    seen = len(service.lines)
    with run_load(service) as load, faulty(service, "no-memory") as worker:
        # It reports the batch, or cannot even do that.
        assert ended(service, "worker-that-no-memory", seen)[0] in ("error", "exit")
        # Exits normally, by its own exit timer, by the interpreter's MemoryError, or by `terminate` of an abort.
        assert worker.wait(WAIT_S) != 0
    assert_nothing_lost(service, load)


def test_worker_whose_gpu_has_failed_ends_with_its_own_status(service: LocalService) -> None:
    seen = len(service.lines)
    with run_load(service) as load, faulty(service, "device-fails") as worker:
        assert worker.wait(WAIT_S) == 71
        assert ended(service, "worker-that-device-fails", seen) == ["error"]
    assert_nothing_lost(service, load)


def test_worker_that_computes_wrong_results_never_serves(service: LocalService) -> None:
    name, seen = "worker-that-lies", len(service.lines)
    with run_load(service) as load, faulty(service, "lies"):
        assert ended(service, name, seen, 2) == ["error", "error"]
        assert_quarantined(service, name, seen)
        assert any("self-test" in line.message for line in service.lines[seen:])
        assert not any(line["worker"] == name and "->ready" in line.message for line in service.lines[seen:])
    assert_nothing_lost(service, load)


def test_slow_worker_continues_and_its_batches_are_hedged(service: LocalService) -> None:
    name, seen = "worker-that-slow", len(service.lines)
    with run_load(service) as load, faulty(service, "slow"):
        service.wait_for(lambda x: x["worker"] == name and "->ready" in x.message, WAIT_S, after=seen)
        while service.metric("multiworld_hedges_total", outcome="won") == 0:  # bounded by the test's own timeout
            assert answers(service, 1) == [200]
        assert states(service)[EMPTY] == "ready"
    assert_nothing_lost(service, load)


@pytest.mark.parametrize("fault", ["dies-loading", "dies-warming"])
def test_worker_that_dies_before_serving_costs_no_request(service: LocalService, fault: str) -> None:
    seen = len(service.lines)
    with run_load(service) as load, faulty(service, fault) as worker:
        assert worker.wait(WAIT_S) == -signal.SIGKILL
        assert ended(service, f"worker-that-{fault}", seen) == ["exit"]
    assert_nothing_lost(service, load)


def test_slot_is_free_again_when_a_worker_asks_and_never_joins(service: LocalService) -> None:
    host, _, port = service.join_address.rpartition(":")
    seen = len(service.lines)

    def offer() -> JoinOffer:
        question = JoinRequest("ghost", "cpu", "nowhere", 1).to_json()
        return JoinOffer.from_json(asyncio.run(ask(host, int(port), question, secret=TOKEN.encode())))

    first, second = offer(), offer()
    assert (first.world, second.world, second.generation) == (EMPTY, EMPTY, first.generation + 1)
    assert ended(service, "ghost", seen, 2) == ["exit", "timeout"]
    assert states(service)[EMPTY] == "broken"


def test_second_worker_with_a_name_waits_while_the_first_serves(service: LocalService) -> None:
    seen = len(service.lines)
    with run_load(service) as load, external_worker(service.join_address, name="sound-a") as twin:
        service.wait_for(lambda x: "another worker with this name" in x.message, WAIT_S, after=seen)
        assert twin.poll() is None
        assert states(service)[EMPTY] != "ready"
    assert_nothing_lost(service, load)
    assert not any("->broken" in line.message for line in service.lines[seen:])


@pytest.mark.parametrize("direction", get_args(Direction))
def test_partitioned_worker_is_dropped_and_rejoins_after_healing(service: LocalService, direction: Direction) -> None:
    name, seen = f"cut-{direction.replace('_', '-')}", len(service.lines)
    with Relay(service.join_address) as relay, external_worker(relay.address, name=name) as worker:
        service.wait_for(lambda x: x["worker"] == name and "->ready" in x.message, WAIT_S, after=seen)
        with run_load(service) as load:
            seen = len(service.lines)
            relay.cut(direction)
            (cause,) = ended(service, name, seen)
            # If the other direction still works, the leader's close message reaches the worker.
            assert cause in {"hang", "exit", "transport"}
            relay.heal()
            service.wait_for(lambda x: x["worker"] == name and "->ready" in x.message, WAIT_S, after=seen)
        assert_nothing_lost(service, load)
        assert worker.poll() is None


def test_late_former_incarnation_finds_its_slot_taken(service: LocalService) -> None:
    seen = len(service.lines)
    with (
        external_worker(service.join_address, name="frozen") as frozen,
        run_load(service) as load,
    ):
        service.wait_for(lambda x: x["worker"] == "frozen" and "->ready" in x.message, WAIT_S, after=seen)
        os.kill(frozen.pid, signal.SIGSTOP)
        try:
            assert ended(service, "frozen", seen) == ["hang"]
            with external_worker(service.join_address, name="successor"):
                service.wait_for(lambda x: x["worker"] == "successor" and "->ready" in x.message, WAIT_S, after=seen)
                thawed = len(service.lines)
                os.kill(frozen.pid, signal.SIGCONT)
                again = service.wait_for(
                    lambda x: x["worker"] == "frozen" and "->ready" in x.message, WAIT_S, after=thawed
                )
                assert again["world"] != EMPTY, "an extra replica: its former slot belongs to the successor"
        finally:
            os.kill(frozen.pid, signal.SIGCONT)
    assert_nothing_lost(service, load)


def test_worker_of_a_larger_stage_is_reassigned_to_an_empty_one(token_file: Path) -> None:
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(leader(token_file))
        workers = {}
        for name in ("a", "b", "c"):  # s0.r0, s1.r0, s0.r1
            workers[name] = stack.enter_context(external_worker(service.join_address, name=name))
            service.wait_for(lambda x, name=name: x["worker"] == name and "->ready" in x.message, WAIT_S)  # type: ignore[misc]
        with run_load(service) as load:
            seen = len(service.lines)
            workers["b"].kill()
            moved = service.wait_for(
                lambda x: x["stage"] == 1 and "->ready" in x.message and x["worker"] in "ac", WAIT_S, after=seen
            )
            assert answers(service) == [200, 200, 200]
        assert_nothing_lost(service, load)
        assert workers[moved["worker"]].poll() is None, "the same process"
