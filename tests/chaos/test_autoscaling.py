"""`--autoscale` starts a worker under load and stops it afterwards, and no request fails."""

import pytest

from multiworld_serving.testing.load.clients import run_load
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.load.requests import ReferenceRequest
from tests.chaos.clients import answers, assert_nothing_lost
from tests.services import small_service

pytestmark = pytest.mark.timeout(300)
WAIT_S = 120.0


def test_a_worker_is_added_under_load_and_leaves_afterwards_without_a_failed_request() -> None:
    with small_service(image_size=224, leaders=2, threads=1, autoscale="1..2") as service:
        requests = [ReferenceRequest(photo())]
        with run_load(service.url, requests, clients=8) as load:  # the only worker is always busy
            service.wait_for(lambda line: line.message == "autoscaling: workers 1 -> 2", WAIT_S)
            service.wait_for(lambda line: "joining" in line.message and line["worker"] == "local-1", WAIT_S)
        with run_load(service.url, requests, rate_hz=2.0) as light:
            service.wait_for(lambda line: line.message.startswith("autoscaling: stopping worker=local-"), WAIT_S)
            service.wait_for(lambda line: "draining->" in line.message and "cause=left" in line.message, WAIT_S)
            assert answers(service, 5) == [200] * 5
        assert_nothing_lost(service, load)
        assert_nothing_lost(service, light)
        assert service.metric("multiworld_world_failures_total") == 0
        assert len(service.status()["stages"][0]["replicas"]) == 1
