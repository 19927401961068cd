"""Kill, freeze and cut each layer of a running service: the requests are answered, the cause is counted, and the service is whole again."""

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from multiworld_serving.testing.chaos.faults import FAULTS
from multiworld_serving.testing.chaos.observer import ReplicaKey
from multiworld_serving.testing.chaos.system.processes import Resources, resources
from multiworld_serving.testing.local_service import LocalService, LogLine
from tests.chaos.clients import assert_nothing_lost, run_load
from tests.chaos.injections import make_fault
from tests.services import is_whole, small_service
from tests.waiting import wait_until

FIRST, LAST = (0, 0), (1, 1)
MATRIX: dict[str, tuple[ReplicaKey, ...]] = {
    "kill": (LAST,),
    "freeze": (FIRST,),
    "cut": (LAST,),
    "cut-from": (FIRST,),
    "cut-to": (LAST,),
    "reset": (FIRST,),
    "leave": (LAST,),
    "two": (FIRST, LAST),
    "stage": ((1, 0), LAST),
    "all": (FIRST, (0, 1), (1, 0), LAST),
    "kill-holder": (FIRST, LAST),
    "kill-reader": (FIRST, LAST),
    "edge-cut": (FIRST, LAST),
    "leader-kill": (),
    "leader-freeze": (),
    "leader-cut": (),
    "frontend-kill": (),
    "frontend-freeze": (),
    "disconnect": (),
}
"""The replicas that each fault affects, by stage and slot."""


@pytest.mark.parametrize("name", MATRIX)
def test_no_request_fails(service: LocalService, name: str) -> None:
    fault = FAULTS[name]
    if why := fault.unavailable_reason():
        pytest.skip(why)
    with run_load(service) as load:
        made = make_fault(service, name, *MATRIX[name])
    assert fault.causes is None or set(made.causes) <= set(fault.causes)
    assert bool(fault.causes) <= bool(made.causes), "the fault had no effect"
    load.samples[:] = [sample for sample in load.samples if sample.status not in fault.excused]
    assert_nothing_lost(service, load)


def test_leader_memory_is_stable_when_workers_are_killed_and_rejoin(service: LocalService) -> None:
    make_fault(service, "kill", FIRST)
    wait_until(lambda: service.metric("multiworld_world_up") == 4)  # it has joined again
    pids = service.child_pids("leader").values()
    before = [resources(pid) for pid in pids]
    for _ in range(2):
        make_fault(service, "kill", FIRST)

    def is_stable(was: Resources, now: Resources) -> bool:
        return now.threads <= was.threads + 2 and now.descriptors <= was.descriptors + 2

    wait_until(lambda: all(map(is_stable, before, map(resources, pids))))


def test_kill_of_a_worker_is_told_in_few_lines_which_name_it_equally(service: LocalService) -> None:
    logged = len(service.lines)

    def told() -> list[LogLine]:
        """Of stage 0, without workers that seem to hang on a busy machine."""
        lines = [line for line in service.lines[logged:] if line["level"] == "warning" and line["cause"] != "hang"]
        return [line for line in lines if "world=s0.r" in line.message]

    def lost() -> list[str]:
        return [line["worker"] for line in told() if f"worker={line['worker']} ready->broken" in line.message]

    make_fault(service, "kill", FIRST)
    wait_until(lost)
    assert len(lost()) == 1
    assert len(told()) <= 2


def test_any_frontend_serves_status_and_metrics_of_all_processes(service: LocalService) -> None:
    for slot in (0, 1):
        other = service.child_pids("frontend")[slot]
        os.kill(other, signal.SIGSTOP)
        try:
            with httpx.Client(base_url=service.url, timeout=60.0) as client:
                # The frozen frontend is missing if this took longer than the heartbeat timeout.
                status = ['"state":"ready","reasons":[]', f'"name":"frontend-{1 - slot}"']
                metrics = [f'process="{each}"' for each in ("leader-0", "leader-1", "supervisor")]
                for path, texts in (("/status", status), ("/metrics", metrics)):
                    wait_until(lambda: (text := client.get(path).text) and all(each in text for each in texts))  # noqa: B023
        finally:
            with contextlib.suppress(ProcessLookupError):  # the supervisor has replaced it
                os.kill(other, signal.SIGCONT)
        wait_until(lambda: is_whole(service))


def test_local_workers_are_forked_and_have_process_titles(service: LocalService) -> None:
    """If importing torch started a thread, workers would be spawned and start in seconds instead."""
    for name, pid in service.worker_pids().items():
        assert Path(f"/proc/{pid}/cmdline").read_text().startswith(f"multiworld worker --name {name}")
    assert not [line for line in service.lines if "started a thread" in line.message]


# -- a service of its own, whose workers cannot be reached: leaders relay the tensors -----------------------------------------------


@pytest.fixture(scope="module")
def relayed() -> Iterator[LocalService]:
    with small_service(stages=2, replicas=2, leaders=2, frontends=2, advertise_edge="127.0.0.1:1") as running:
        yield running


@pytest.mark.parametrize("name", ["kill", "leader-kill"])
def test_no_request_fails_when_leaders_relay_the_tensors(name: str, relayed: LocalService) -> None:
    with run_load(relayed) as load:
        make_fault(relayed, name, *MATRIX[name])
    assert_nothing_lost(relayed, load)
    wait_until(lambda: relayed.metric("multiworld_relayed_bytes_total") > 0)
    wait_until(lambda: relayed.metric("multiworld_requests_resubmitted_total", reason="relay") >= 1)


def test_version_is_loaded_by_all_leaders_and_by_one_that_starts_later(relayed: LocalService) -> None:
    operations = f"{relayed.metrics_url.removesuffix('/metrics')}/v2/repository/models/resnet18/load"
    for weights, status in (("no-such-weights", 400), ("random:1", 200)):
        loaded = httpx.post(operations, json={"parameters": {"weights": weights}}, timeout=150)
        assert loaded.status_code == status, loaded.text
    pid = relayed.child_pids("leader")[0]

    def versions() -> list[str]:
        return [each["version"] for each in relayed.status()["leaders"] if each["pid"] not in (pid, None)]

    with run_load(relayed) as load:
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: versions() == ["random:1"] * 2)
    assert_nothing_lost(relayed, load)


def test_all_processes_end_when_the_supervisor_is_killed(relayed: LocalService) -> None:
    pids = [pid for kind in ("frontend", "leader", "worker") for pid in relayed.child_pids(kind).values()]
    ends, processes = select.poll(), [os.pidfd_open(pid) for pid in pids]
    for process in processes:
        ends.register(process, select.POLLIN)
    os.kill(pids[0], signal.SIGSTOP)
    relayed.stop(signal.SIGKILL)
    for _ in processes:
        (ended, _), *_ = ends.poll(60e3)
        ends.unregister(ended)
        os.close(ended)
