"""A host is taken out of service and put back while requests are answered."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from multiworld_serving.cli.main import main
from multiworld_serving.testing.local_service import LocalService
from tests.chaos.clients import assert_nothing_lost, external_worker, run_load
from tests.services import says, service_for_workers
from tests.waiting import wait_until

WAIT_S = 90.0


def ready_hosts(service: LocalService) -> list[str]:
    """The hosts of the ready workers."""
    replicas = [replica for stage in service.status()["stages"] for replica in stage["replicas"]]
    return sorted(replica["host"] for replica in replicas if replica["state"] == "ready")


def test_drained_host_serves_again_after_undo_and_no_request_fails(
    token_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "b.log"
    with ExitStack() as stack:
        service = stack.enter_context(service_for_workers(token_file, stages=2, replicas=2, leaders=2))
        leaders = service.join_address.split(",")
        url = ("--url", service.metrics_url.removesuffix("/metrics"))
        for name in ("a-0", "a-1"):
            stack.enter_context(external_worker(*leaders, name=name, options=("--advertise-host", "a")))
        wait_until(lambda: ready_hosts(service) == ["a", "a"])
        assert main(["drain", "a", *url]) == 1
        assert "start a worker on another host first" in capsys.readouterr().err
        b = ("--advertise-host", "b")
        workers = [stack.enter_context(external_worker(*leaders, name=f"b-{number}", options=b)) for number in (0, 1)]
        wait_until(lambda: ready_hosts(service) == ["a", "a", "b", "b"])
        with run_load(service) as load:
            assert main(["drain", "b", *url]) == 0
            assert "b is drained" in capsys.readouterr().out
            assert [worker.wait(WAIT_S) for worker in workers] == [0, 0], "they have left as after SIGTERM"
            # Whatever supervises the workers starts them again; also the next leader does not take them.
            with log.open("w") as stderr:
                stack.enter_context(external_worker(*leaders, name="b-0", options=b, stderr=stderr))
                wait_until(lambda: "its host is drained" in log.read_text())
                seen, leader = len(service.lines), service.status()["leaders"][0]["pid"]
                os.kill(leader, signal.SIGKILL)
                says(service, "leader slot=0 pid=", after=seen)
                wait_until(lambda: ready_hosts(service) == ["a", "a"])
                assert main(["status", *url]) == 0
                assert "drained hosts: b" in capsys.readouterr().out
                assert main(["drain", "b", "--undo", *url]) == 0
                wait_until(lambda: ready_hosts(service) == ["a", "a", "b"])
        assert_nothing_lost(service, load)
