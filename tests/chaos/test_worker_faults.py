"""Every fault of a worker has a defined outcome and a cause in the log, and costs no request while a replica is left."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiworld_serving.testing.local_service import LocalService
from tests.chaos.clients import answers, assert_nothing_lost, external_worker, run_load
from tests.nursery import Process
from tests.services import TOKEN, service_for_workers
from tests.waiting import wait_until

WAIT_S = 120.0
EXIT_REFUSED = 2
EMPTY = "s1.r1"
"""The slot that the three healthy workers leave to the worker of the test."""


@pytest.fixture(scope="module")
def service(token_file: Path) -> Iterator[LocalService]:
    """Two stages with two replicas each, served by three healthy workers."""
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(service_for_workers(token_file, stages=2, replicas=2, hang_timeout_s=10))
        for name in ("sound-a", "sound-b", "sound-c"):
            stack.enter_context(external_worker(running.join_address, name=name))
            running.wait_for(lambda line, name=name: line["worker"] == name and "->ready" in line.message, WAIT_S)  # type: ignore[misc]
        yield running


def faulty(service: LocalService, fault: str) -> contextlib.AbstractContextManager[Process]:
    return external_worker(service.join_address, name=f"worker-that-{fault}", fault=fault)


def ended(service: LocalService, worker: str, after: int, count: int = 1) -> list[str]:
    """The causes of this many ended links of this worker."""
    causes = []
    for _ in range(count):
        line = service.wait_for(lambda x: x["worker"] == worker and "->broken" in x.message, WAIT_S, after=after)
        causes.append(line["cause"])
        after = next(number for number, each in enumerate(service.lines) if each is line) + 1
    return causes


def states(service: LocalService) -> dict[str, str]:
    return {
        f"s{stage['index']}.r{replica['slot']}": replica["state"]
        for stage in service.status()["stages"]
        for replica in stage["replicas"]
    }


FAULTS = {
    "dies": ({"exit"}, -signal.SIGKILL),
    "dies-loading": ({"exit"}, -signal.SIGKILL),
    "dies-warming": ({"exit"}, -signal.SIGKILL),
    "hangs": ({"hang"}, 70),
    "raises": ({"error"}, None),
    "lies": ({"error"}, None),
    # It reports the batch, or cannot even do that; it ends by its own exit timer, a MemoryError, or an abort.
    "no-memory": ({"error", "exit"}, ...),
    "device-fails": ({"error"}, 71),
    "device-fails-loading": ({"error"}, 71),
}
"""The causes with which the link may end, and the exit status of the worker: None if it goes on, ... for any error."""


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_worker_costs_no_request(service: LocalService, fault: str) -> None:
    causes, status = FAULTS[fault]
    name, seen = f"worker-that-{fault}", len(service.lines)
    with run_load(service) as load, faulty(service, fault) as worker:
        assert set(ended(service, name, seen)) <= causes
        if status is not None:
            exited = worker.wait(WAIT_S)
            assert exited == status or (status is ... and exited != 0)
        else:
            assert set(ended(service, name, seen, 2)) <= causes
            service.wait_for(lambda x: x["worker"] == name and "quarantined for" in x.message, WAIT_S, after=seen)
            wait_until(lambda: service.metric("multiworld_workers_quarantined") == 1)
        if fault == "lies":
            assert any("self-test" in line.message for line in service.lines[seen:])
            assert not any(line["worker"] == name and "->ready" in line.message for line in service.lines[seen:])
    assert_nothing_lost(service, load)


def test_slow_worker_continues_and_its_batches_are_hedged(service: LocalService) -> None:
    name, seen = "worker-that-slow", len(service.lines)
    with run_load(service) as load, faulty(service, "slow"):
        service.wait_for(lambda x: x["worker"] == name and "->ready" in x.message, WAIT_S, after=seen)
        while service.metric("multiworld_hedges_total", outcome="won") == 0:  # bounded by the test's own timeout
            assert answers(service, 1) == [200]
        wait_until(lambda: states(service)[EMPTY] == "ready")
    assert_nothing_lost(service, load)


def test_second_worker_with_a_name_waits_while_the_first_serves(service: LocalService) -> None:
    seen = len(service.lines)
    with run_load(service) as load, external_worker(service.join_address, name="sound-a") as twin:
        service.wait_for(lambda x: "another worker with this name" in x.message, WAIT_S, after=seen)
        assert twin.poll() is None
        wait_until(lambda: states(service)[EMPTY] != "ready")  # the status may be a moment late
    assert_nothing_lost(service, load)
    assert not any("->broken" in line.message for line in service.lines[seen:])


def rotate(service: LocalService, file: Path, *tokens: str) -> None:
    """Rotate like an operator: change the file, then send the signal."""
    seen = len(service.lines)
    file.write_text("\n".join(tokens))
    os.kill(service.pid, signal.SIGHUP)
    told = service.wait_for(lambda line: "reloaded the join tokens" in line.message, WAIT_S, after=seen)
    assert int(told["tokens"]) == len(tokens)


def test_rotation_of_the_token_fails_no_request(service: LocalService, token_file: Path) -> None:
    """The last test of this file: no worker with the former token can join any more."""
    seen = len(service.lines)
    with run_load(service) as load:
        rotate(service, token_file, "new", TOKEN)
        with external_worker(service.join_address, name="newcomer", token="new"):
            service.wait_for(lambda x: x["worker"] == "newcomer" and "->ready" in x.message, WAIT_S, after=seen)
            rotate(service, token_file, "new")
            with external_worker(service.join_address, name="late") as late:
                assert late.wait(WAIT_S) == EXIT_REFUSED
            assert answers(service) == [200, 200, 200]
            wait_until(lambda: set(states(service).values()) == {"ready"})  # workers that have joined stay
    assert_nothing_lost(service, load)
