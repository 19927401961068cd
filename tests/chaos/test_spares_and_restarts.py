"""Spares replace failed workers, and every worker can be restarted in turn while requests are answered."""

import os
import signal
from collections.abc import Collection, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest

from multiworld_serving.cli.main import main
from multiworld_serving.testing.local_service import LocalService, LogLine
from tests.chaos.clients import answers, assert_nothing_lost, run_load
from tests.services import small_service
from tests.waiting import wait_until

WAIT_S = 120.0


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    """Two stages with one replica each, one spare, and two leaders."""
    with small_service(stages=2, spares=1, leaders=2) as running:
        yield running


def until_a_spare_is_ready(service: LocalService, killed: Collection[int] = ()) -> None:
    """Wait for it, and until the first leader is ready and the status, which may be a moment late, has none of the killed processes."""

    def is_ready() -> bool:
        status = service.status()
        replicas = [replica for stage in status["stages"] for replica in stage["replicas"]]
        serving = {replica["pid"] for replica in replicas if replica["state"] == "ready"}
        spares = {spare["pid"] for spare in status["spares"] if spare["state"] == "ready"} - serving
        leaders = [leader["state"] for leader in status["leaders"]]
        assert answers(service, 1) == [200]
        is_complete = len(serving) == 2 and bool(spares) and leaders == ["ready", "standby"]
        return is_complete and not (serving | spares) & set(killed)

    wait_until(is_ready)


def is_promoted_by_the_first_leader(stage: int, line: LogLine) -> bool:
    return line["process"] == "leader-0" and "spare promoted" in line.message and line["stage"] == stage


def test_spare_takes_over_each_stage_when_its_only_replica_is_killed(service: LocalService) -> None:
    killed: list[int] = []
    with run_load(service) as load:
        for stage in (0, 1, 1):
            until_a_spare_is_ready(service, killed)
            seen, replica = len(service.lines), service.status()["stages"][stage]["replicas"][0]
            os.kill(replica["pid"], signal.SIGKILL)
            killed.append(replica["pid"])
            service.wait_for(partial(is_promoted_by_the_first_leader, stage), WAIT_S, after=seen)
        until_a_spare_is_ready(service, killed)
    assert_nothing_lost(service, load)


def test_rolling_restart_fails_no_request(service: LocalService, capsys: pytest.CaptureFixture[str]) -> None:
    until_a_spare_is_ready(service)
    before = {line["pid"] for line in service.lines if "started" in line.message and line["slot"] is not None}
    seen = len(service.lines)
    operations = service.metrics_url.removesuffix("/metrics")
    with run_load(service) as load:
        assert main(["rolling-restart", "--url", operations]) == 0
    said = capsys.readouterr().out
    assert "3 workers restarted" in said
    assert_nothing_lost(service, load)
    running = set(service.worker_pids().values())
    assert len(running) == 3
    assert not running & {int(pid) for pid in before}
    assert not [line.message for line in service.lines[seen:] if line["cause"] == "exit"], "no worker has failed"


def test_accepted_requests_are_answered_when_the_service_stops() -> None:
    with small_service(stages=2, frontends=2) as service, run_load(service, clients=16) as load:
        assert answers(service, 5) == [200] * 5
        workers = list(service.worker_pids().values())
        pids = [service.pid, *workers]
        for pid in workers:  # until the service stops, so that requests are open then
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: service.status()["requests_in_flight"] > 0)
        # Twice, as timeout(1) does: it signals the process and then its process group.
        os.kill(service.pid, signal.SIGTERM)
        service.wait_for(lambda line: line.message.startswith("stopping: waiting"), WAIT_S)
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        assert service.stop() == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    stopping = [line for line in service.lines if line.message.startswith("stopping: waiting")][:2]
    accepted = sum(int(line.message.split("waiting for ")[1].split()[0]) for line in stopping)
    assert accepted
    at_s = min(datetime.fromisoformat(line["time"]).timestamp() for line in stopping)
    assert len([sample for sample in load.samples if sample.status == 200 and sample.done_s >= at_s]) >= accepted
    unwanted = ("unanswered", "SIGKILL", "Traceback")
    assert not [line.message for line in service.lines if any(word in line.message for word in unwanted)]
    # The others are refused while it drains; afterwards nothing listens.
    assert {sample.status for sample in load.samples} <= {200, 503, 0}
    assert all("draining" in sample.error for sample in load.samples if sample.status == 503)
