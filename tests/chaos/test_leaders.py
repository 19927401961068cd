"""Two leaders: whatever happens to one of them, no request fails, and a new one takes part again."""

import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from multiworld_serving.cli.main import main
from multiworld_serving.testing.load.clients import record_reference_answers
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService
from tests.chaos.clients import assert_nothing_lost, run_load
from tests.services import small_service
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)
WAIT_S = 60.0


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    with small_service(stages=2, replicas=2, leaders=2) as running:
        wait_for_leaders(running, 2)
        yield running
        assert running.stop() == 0


def wait_for_leaders(service: LocalService, count: int, without: int = 0) -> None:
    """Wait until so many leaders are ready, none of which has the process id `without`."""

    def ready() -> int:
        leaders = service.status()["leaders"]
        if any(leader["pid"] == without for leader in leaders):
            return 0
        return sum(leader["state"] == "ready" for leader in leaders)

    wait_until(lambda: ready() == count)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_no_request_fails_when_a_leader_ends(service: LocalService, signum: signal.Signals) -> None:
    questions = record_reference_answers(service.url, [(photo(seed), "image/jpeg") for seed in range(4)])
    with run_load(service, clients=8, questions=questions) as load:
        for slot in (0, 1):
            pid = service.child_pids("leader")[slot]
            os.kill(pid, signum)
            wait_for_leaders(service, 2, without=pid)
    assert_nothing_lost(service, load)
    assert service.metric("multiworld_leader_restarts_total") >= 2
    assert service.metric("multiworld_leaders") == 2


def test_requests_wait_when_the_only_other_leader_is_killed_too(service: LocalService) -> None:
    with run_load(service) as load:
        pids = service.child_pids("leader")
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid in pids.values():
            wait_for_leaders(service, 2, without=pid)
    # The same request may be at both leaders in turn: it is rejected as poison. All others are answered.
    assert load.samples
    assert {sample.status for sample in load.failed} <= {500, 503}, load.failed[:3]
    assert sum("poison" not in sample.error for sample in load.failed) == 0, load.failed[:3]


def layout(service: LocalService, leader: int, after: int) -> dict[str, str]:
    """The stage of each worker that has joined this leader since this line of the log."""
    return {
        line["worker"]: line["stage"]
        for line in service.lines[after:]
        if line["process"] == f"leader-{leader}" and line["worker"] and line.message.endswith(" joining")
    }


def test_restarted_leader_places_each_worker_on_the_stage_that_it_has_in_memory(service: LocalService) -> None:
    layouts = [layout(service, 0, 0)]
    for slot in (0, 1):
        begin, pid = len(service.lines), service.child_pids("leader")[slot]
        os.kill(pid, signal.SIGKILL)
        wait_for_leaders(service, 2, without=pid)
        wait_until(lambda slot=slot, begin=begin: len(layout(service, slot, begin)) == 4)  # type: ignore[misc]
        layouts.append(layout(service, slot, begin))
        loaded = [line.message for line in service.lines[begin:] if line["execution_mode"]]
        assert loaded
        assert all("is in memory already" in message for message in loaded)
    assert layouts[1:] == layouts[:-1]


def test_version_is_loaded_by_all_leaders_and_by_one_that_starts_later(service: LocalService) -> None:
    operators = service.metrics_url.removesuffix("/metrics")
    assert main(["load-version", "random:7", "--operations-url", operators]) == 0
    assert {leader["version"] for leader in service.status()["leaders"]} == {"random:7"}
    pid = service.child_pids("leader")[0]
    with run_load(service, clients=4) as load:
        os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: (
                [leader["version"] for leader in service.status()["leaders"] if leader["pid"] != pid]
                == ["random:7"] * 2
            )
        )
    assert_nothing_lost(service, load)
    with httpx.Client(base_url=service.url, timeout=60.0) as client:
        for _ in range(8):
            answer = client.post("/predict", content=photo(), headers={"content-type": "image/jpeg"})
            assert answer.headers["x-model-version"] == "random:7"


def test_failed_load_leaves_all_leaders_on_the_old_version(service: LocalService) -> None:
    operators = service.metrics_url.removesuffix("/metrics")
    before = {leader["version"] for leader in service.status()["leaders"]}
    assert main(["load-version", "no-such-weights", "--operations-url", operators]) != 0
    assert {leader["version"] for leader in service.status()["leaders"]} == before
