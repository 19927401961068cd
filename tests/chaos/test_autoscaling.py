"""`--autoscale` starts a worker under load and stops it afterwards, and no request fails."""

from functools import partial

import pytest

from multiworld_serving.server.supervisor import group
from multiworld_serving.server.supervisor.scaling.policy import Limits
from multiworld_serving.testing.load.clients import run_load
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.load.requests import ReferenceRequest
from multiworld_serving.testing.local_service import LocalService
from tests.chaos.clients import answers, assert_nothing_lost
from tests.nursery import run_program, start_program
from tests.services import small_service
from tests.waiting import wait_until

WAIT_S = 300.0


def run_with_a_short_memory(arguments: list[str], environment: dict[str, str]) -> None:
    """In a forked process: `multiworld serve`, which stops workers after ten seconds of low load, not sixty."""
    setattr(group, "Limits", partial(Limits, down_after_s=10.0))  # noqa: B010 - mypy rejects the assignment
    run_program(arguments, environment)


def test_a_worker_is_added_under_load_and_leaves_afterwards_without_a_failed_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = partial(start_program, call=f"{__name__}:run_with_a_short_memory")
    monkeypatch.setattr(LocalService, "start_program", staticmethod(start))
    with small_service(image_size=224, leaders=2, optimize="fused", autoscale="1..2") as service:
        requests = [ReferenceRequest(photo())]
        with run_load(service.url, requests, clients=8) as load:  # the only worker is always busy
            service.wait_for(lambda line: line.message == "autoscaling: workers 1 -> 2", WAIT_S)
            service.wait_for(lambda line: "joining" in line.message and line["worker"] == "local-1", WAIT_S)
        with run_load(service.url, requests, rate_hz=1.0) as light:  # little, also for a busy machine
            service.wait_for(lambda line: line.message.startswith("autoscaling: stopping worker=local-"), WAIT_S)
            service.wait_for(lambda line: "draining->" in line.message and "cause=left" in line.message, WAIT_S)
            assert answers(service, 5) == [200] * 5
        assert_nothing_lost(service, load)
        assert_nothing_lost(service, light)
        assert service.metric("multiworld_world_failures_total") == 0
        wait_until(lambda: len(service.status()["stages"][0]["replicas"]) == 1)  # at the acting leader too
