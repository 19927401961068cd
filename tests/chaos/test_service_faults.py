"""Workers of a running service are killed, frozen or told to leave: no request fails, they come back, and the log tells it."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from multiworld_serving.testing.chaos.system.processes import resources
from multiworld_serving.testing.local_service import LocalService, LogLine
from tests.chaos.clients import answers, assert_nothing_lost, run_load
from tests.chaos.injections import make_fault
from tests.services import small_service

pytestmark = pytest.mark.timeout(600)


def test_local_workers_are_forked_and_have_process_titles(service: LocalService) -> None:
    """If importing torch started a thread, workers would be spawned and start in seconds instead."""
    for name, pid in service.worker_pids().items():
        assert Path(f"/proc/{pid}/cmdline").read_text().startswith(f"multiworld worker --name {name}")
    assert not [line for line in service.lines if "fork server" in line.message]


def assert_no_request_fails(service: LocalService, stage: int, name: str, cause: str) -> None:
    """Inject the fault into replica 0 of the stage under load."""
    failures = service.metric("multiworld_world_failures_total", stage=str(stage), cause=cause)
    with run_load(service, clients=16) as load:
        fault = make_fault(service, name, (stage, 0))
    assert fault.causes == (cause,)
    assert_nothing_lost(service, load)
    assert service.metric("multiworld_world_failures_total", stage=str(stage), cause=cause) == failures + 1
    assert service.metric("multiworld_redundancy") == 1


@pytest.mark.parametrize(
    ("name", "cause", "stage"),
    [("kill", "exit", 0), ("freeze", "hang", 0), ("kill", "exit", 1)],
    ids=["killed-0", "frozen-0", "killed-1"],
)
def test_no_request_fails_when_a_worker_is(service: LocalService, stage: int, name: str, cause: str) -> None:
    assert_no_request_fails(service, stage, name, cause)


def test_log_and_terminal_show_the_history_of_a_frozen_worker(service: LocalService, tmp_path: Path) -> None:
    """The log fields of the leader document its whole history, and the terminal shows it as well."""
    generation = int(service.status()["stages"][1]["replicas"][0]["generation"])
    seen = tmp_path / "watch.txt"
    command = [sys.executable, "-m", "multiworld_serving.cli.main", "status", "--watch", "--url", service.url]
    with seen.open("w") as output:
        watch = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            assert_no_request_fails(service, 1, "freeze", "hang")
            service.wait_until_complete(90)
            wait_for_a_tick = threading.Event()
            wait_for_a_tick.wait(3)  # the terminal is updated within a second
            assert watch.poll() is None
            watch.send_signal(signal.SIGINT)
            assert watch.wait(30) == 130
        finally:
            watch.kill()
            watch.wait()
    lines = service.lines
    of_generation = {"world": r"s1\.r0", "generation": str(generation)}
    started = index(lines, -1, **of_generation, stage="1", replica="0")
    worker = str(lines[started]["worker"])
    assert lines[started]["pid"]
    assert lines[started]["device"] == "cpu"
    ready = index(lines, started, **of_generation, worker=worker, message=".*checking->ready.*")
    broken = index(lines, ready, **of_generation, worker=worker, cause="hang", level="warning")
    assert float(lines[broken]["after_s"]) > 0
    back = index(lines, broken, world=r"s1\.r0", generation=str(generation + 1), message=".*joining.*")
    again = index(lines, back, world=r"s1\.r0", message=".*checking->ready.*")
    assert int(lines[again]["generation"]) > generation, "a busy machine may need two attempts"
    for line in lines[broken:]:
        if "rerouted" in line.message and line["stage"] == 1:
            assert line["world"] == "s1.r1"
            assert line["batch"] is not None
    shown = seen.read_text()
    assert "broken" in shown
    assert "stage 1 replica 0" in shown
    assert "stage 1 replica 0 rejoined" in shown


def index(lines: list[LogLine], after: int, **fields: object) -> int:
    """Index of the first line with these fields after another index."""
    for at in range(after + 1, len(lines)):
        if all(re.fullmatch(str(value), str(lines[at][name])) for name, value in fields.items()):
            return at
    raise AssertionError(f"no line with {fields} after {lines[after].message!r}")


def test_no_request_fails_when_one_worker_of_each_stage_is_killed(service: LocalService) -> None:
    with run_load(service, clients=16) as load:
        make_fault(service, "kill", (0, 1), (1, 1))
    assert_nothing_lost(service, load)


def test_no_request_fails_when_a_worker_is_told_to_leave(service: LocalService) -> None:
    worker = service.worker_at(0, 0)
    assert worker is not None
    seen = len(service.lines)
    with run_load(service, clients=16) as load:
        os.kill(service.worker_pids()[worker], signal.SIGTERM)
        gone = service.wait_for(lambda x: x["world"] == "s0.r0" and "->broken" in x.message, 60, after=seen)
        service.wait_until_complete(120)
    assert gone["cause"] == "left"
    assert_nothing_lost(service, load)


def test_requests_wait_and_succeed_when_a_whole_stage_is_killed(service: LocalService) -> None:
    seen, pids = len(service.lines), service.worker_pids()
    with run_load(service, clients=4) as load:
        for replica in service.status()["stages"][1]["replicas"]:
            os.kill(pids[replica["worker"]], signal.SIGKILL)
        for slot in (0, 1):
            world = f"s1.r{slot}"
            service.wait_for(lambda x, w=world: x["world"] == w and "->broken" in x.message, 60, after=seen)  # type: ignore[misc]
        service.wait_until_complete(120)
    refused = [
        sample for sample in load.failed if sample.status != 503
    ]  # a slow machine may need longer than recovery_grace_s
    assert not refused, refused[:3]
    assert answers(service) == [200, 200, 200]


def test_leader_memory_is_stable_when_workers_are_killed_and_rejoin(service: LocalService) -> None:
    make_fault(service, "kill", (0, 0), (1, 0))
    before = resources(service.pid)
    for cycle in range(3):
        make_fault(service, "kill", (0, cycle % 2), (1, cycle % 2))
    after = resources(service.pid)
    assert after.threads <= before.threads + 2, f"threads {before.threads} -> {after.threads}"
    assert after.descriptors <= before.descriptors + 2, f"descriptors {before.descriptors} -> {after.descriptors}"


def test_no_process_is_left_when_the_leader_is_killed() -> None:
    with small_service(replicas=2) as running:
        pids = list(running.worker_pids().values())
        assert len(pids) == 2
        running.stop(signal.SIGKILL)
        gone = threading.Event()
        for pid in pids:
            while _is_there(pid):
                gone.wait(0.05)  # bounded by the test's own timeout


def _is_there(pid: int) -> bool:
    """Whether the process runs; a zombie that init has not reaped yet does not count."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
