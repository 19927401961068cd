"""Requests do not wait until a frozen worker or leader is lost. Here that would take longer than their deadline."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from multiworld_serving.testing.local_service import LocalService
from tests.chaos.clients import run_load
from tests.services import small_service
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

DEADLINE_S = 10.0
HEARTBEAT_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    settings = {
        "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
        "hang_timeout_s": HEARTBEAT_TIMEOUT_S,
        "timeout_s": DEADLINE_S,
    }
    with small_service(stages=2, replicas=2, leaders=2, **settings) as running:
        yield running


def worker(service: LocalService) -> int:
    replica = service.status()["stages"][0]["replicas"][0]
    return int(replica["pid"])


def acting_leader(service: LocalService) -> int:
    return int(service.status()["leaders"][0]["pid"])


@pytest.mark.parametrize("victim", [worker, acting_leader])
def test_requests_are_answered_while_a_process_is_frozen(
    service: LocalService, victim: Callable[[LocalService], int]
) -> None:
    with run_load(service, clients=4) as load:
        wait_until(lambda: len(load.samples) > 200)
        pid, answered = victim(service), len(load.samples)
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: len(load.samples) > answered + 100)
        finally:
            os.kill(pid, signal.SIGCONT)
    assert not load.failed, load.failed[:3]
