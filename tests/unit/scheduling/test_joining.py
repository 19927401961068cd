"""Which workers of another leader may move to this one, and which stage they keep."""

import time
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest

from multiworld_serving.common.service.predictor import ModelVersion
from multiworld_serving.common.wire.join import JoinRequest
from multiworld_serving.server.leader.replicas.joining import Joining
from multiworld_serving.server.leader.replicas.placement import Placement
from multiworld_serving.server.leader.replicas.reconcile import Goal
from multiworld_serving.server.leader.replicas.worker import Worker


class Leader:
    """A leader of two stages, whose digests are "0" and "1"."""

    def __init__(self, replicas: int = 2) -> None:
        stages = [
            SimpleNamespace(spec=SimpleNamespace(index=index), digest=lambda _, index=index: str(index))
            for index in range(2)
        ]
        versions: Any = SimpleNamespace(current=SimpleNamespace(version=ModelVersion(1, "v1"), stages=stages))
        settings: Any = SimpleNamespace(join_port=0, heartbeat_timeout_s=1.0)
        self.placement = Placement([replicas] * 2, 1)
        self.joining = Joining(versions, settings, self.placement, Goal((1,)), cast(Any, None), 8)
        self.names = map(str, count())

    def request(self, held: str, *, serves: bool) -> JoinRequest:
        return JoinRequest(next(self.names), "cpu", "h", 1, held=tuple(held), serves=serves)

    def may_move(self, held: str) -> bool:
        return not self.joining.wait_s(self.request(held, serves=True))

    def join(self, held: str, *, serves: bool = False, ready: bool = True) -> Worker:
        request = self.request(held, serves=serves)
        slot = self.joining.choose_slot(request)
        worker = Worker(request, slot.id, 1, state="ready" if ready else "joining")
        self.placement.take(slot, worker)
        return worker


def test_workers_move_one_after_another_and_first_those_of_stages_that_have_none() -> None:
    leader = Leader()
    assert not leader.may_move(""), "it serves another version, or has other settings"
    assert leader.may_move("0")
    first = leader.join("0", serves=True, ready=False)
    assert not leader.may_move("1"), "another one is moving"
    first.state = "ready"
    assert (leader.may_move("0"), leader.may_move("1")) == (False, True)
    first.since_s -= 10
    assert leader.may_move("0"), "no worker of the other stage has come for a while"
    first.since_s += 10
    leader.join("1", serves=True)
    assert leader.may_move("0")


@pytest.mark.parametrize("serves", [False, True], ids=["lost its leader", "moves"])
def test_workers_keep_their_stages_at_the_next_leader(serves: bool) -> None:
    leader = Leader()
    names = [leader.join(held, serves=serves).slot.name for held in ("1", "1", "01", "0", "0")]
    assert names == ["s1.r0", "s1.r1", "spare0", "s0.r0", "s0.r1"]


def test_worker_that_joins_again_later_is_placed_where_it_is_needed() -> None:
    leader = Leader()
    for held in "011":
        leader.join(held)
    leader.joining._goal.settle_until_s = 0.0
    assert leader.join("1").slot.name == "s0.r1"


def test_quarantined_worker_asks_soon_again_and_joins_when_its_stage_has_no_other() -> None:
    leader = Leader()
    leader.join("0")
    other, request = leader.join("1"), leader.request("1", serves=False)
    for _ in range(9):
        leader.joining.breaker.failed(request.worker, healthy=False, now_s=time.monotonic())
    assert 0 < leader.joining.wait_s(request) <= 2, "it may have to take the place of another one at any time"
    leader.placement.lose(other)
    assert leader.joining.wait_s(request) == 0
