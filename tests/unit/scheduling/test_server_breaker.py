"""Circuit breaker: how long a failing worker is quarantined."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from multiworld_serving.common.service.predictor import ModelVersion
from multiworld_serving.common.wire.join import JoinRequest
from multiworld_serving.server.leader.replicas.breaker import Breaker
from multiworld_serving.server.leader.replicas.joining import Joining
from multiworld_serving.server.leader.replicas.placement import Placement
from multiworld_serving.server.leader.replicas.reconcile import Goal
from multiworld_serving.server.leader.replicas.worker import Ending, SlotId, Worker


def test_quarantine_doubles_from_the_second_failure_on() -> None:
    breaker = Breaker()
    quarantines_s = [breaker.failed("w", healthy=False, now_s=0.0) for _ in range(9)]
    assert quarantines_s == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert breaker.wait_s("w", 1.0) == 29.0
    assert breaker.wait_s("w", 30.5) == 0.0
    assert breaker.wait_s("another", 1.0) == 0.0
    assert (breaker.quarantined(1.0), breaker.quarantined(31.0)) == (1, 0)


def test_worker_that_served_long_enough_starts_without_quarantine() -> None:
    breaker = Breaker()
    for _ in range(4):
        breaker.failed("w", healthy=False, now_s=0.0)
    assert breaker.failed("w", healthy=True, now_s=10.0) == 0.0
    assert breaker.wait_s("w", 10.0) == 0.0
    assert breaker.failed("w", healthy=False, now_s=11.0) == 0.5


def test_quarantine_and_memory_are_bounded() -> None:
    breaker = Breaker()
    for number in range(10_000):
        assert 0.0 <= breaker.failed("w" if number % 2 else f"w{number}", healthy=False, now_s=float(number)) <= 30.0
    assert breaker.quarantined(0.0) <= 4096


@pytest.mark.parametrize(("why", "given_up"), [("the self-test failed", True), ("CUDA out of memory", False)])
def test_worker_that_fails_for_a_reason_of_the_model_does_not_join_for_ever(why: str, given_up: bool) -> None:
    versions: Any = SimpleNamespace(current=SimpleNamespace(version=ModelVersion(1, "v1"), stages=()))
    settings: Any = SimpleNamespace(join_port=0)
    joining = Joining(versions, settings, Placement([1], 0), Goal((1,)), cast(Any, None), 8)
    request = JoinRequest("w", "cpu", "127.0.0.1", 7, edge="127.0.0.1:1/a")
    for number in range(8):
        assert joining.wait_s(request) == 0.0, "no other worker has the stage"
        worker = Worker(request, SlotId(0, 0), number)
        worker.ending = Ending("error", why, None, False)
        joining.failed(worker)
    assert (joining.wait_s(request) > 0) == given_up
    assert joining.wait_s(JoinRequest("w", "cpu", "127.0.0.1", 7, edge="127.0.0.1:1/b")) == 0.0, "it has restarted"
    versions.current.version = ModelVersion(2, "v2")
    assert joining.wait_s(request) == 0.0, "another version may be computed"
