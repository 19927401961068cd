"""Which leader gets a request of a frontend, and what happens to the request when that leader rejects it or is lost."""

import asyncio
import time
from dataclasses import replace
from typing import get_args

import pytest
import torch

from multiworld_serving.common.service import errors
from multiworld_serving.common.service.messages import Predict
from multiworld_serving.common.service.predictor import ImageSizes, Prediction
from multiworld_serving.common.service.snapshots import ServiceState
from multiworld_serving.common.wire.link import Link, LinkLostError
from multiworld_serving.server.frontend.leaders.pool import LeaderPool
from tests.unit.server.fake_leaders import FIRST, MODEL, desired, leader_state, open_request, pool_of
from tests.unit.server.image_model import image_classifier
from tests.waiting import until

IMAGE = torch.arange(3 * 4 * 4, dtype=torch.uint8).view(3, 4, 4)


async def predict(pool: LeaderPool, *, timeout_s: float = 30.0) -> Prediction:
    return await pool.predict(IMAGE[None], deadline_s=time.monotonic() + timeout_s, request_id="mine")


async def admit(pool: LeaderPool) -> None:
    await pool.admit(time.monotonic() + 30.0)


def lost(*, failed: bool = True) -> LinkLostError:
    return LinkLostError("it is gone", failed=failed)


# -- choice --------------------------------------------------------------------------------------------------------------------


async def test_leader_gets_the_image_and_what_it_needs_to_know() -> None:
    made, leaders = pool_of(1)
    found = await predict(made.pool, timeout_s=3600)
    assert torch.equal(found.output, torch.tensor([[0.25, 0.75]]))
    [(request, payload)] = leaders[0].got
    assert isinstance(request, Predict)
    assert (request.request_id, payload) == ("mine", IMAGE.numpy().tobytes())
    assert 3000 < request.timeout_s <= 3600, "leader and frontend have different clocks"


async def test_first_leader_that_is_ready_gets_the_requests() -> None:
    made, leaders = pool_of(3)
    # If no leader is ready, requests wait at the most recent ready leader until a worker joins.
    for ready, sent in (((1, 1, 1), 0), ((0, 1, 1), 1), ((0, 0, 1), 2), ((1, 0, 1), 0), ((0, 0, 0), 2)):
        for leader, is_ready in zip(leaders, ready, strict=True):
            leader.tells(ready=bool(is_ready))
        before = leaders[sent].sent()
        await predict(made.pool)
        assert leaders[sent].sent() == before + 1


# -- a leader is lost ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("failed", "times"), [(True, 1), (False, 2)])
async def test_request_goes_to_another_leader_when_one_failed_or_several_left(failed: bool, times: int) -> None:
    made, leaders = pool_of(times + 1)
    for leader in leaders[:times]:
        leader.answers = [lost(failed=failed)]
    found = await predict(made.pool)
    assert [leader.sent() for leader in leaders] == [1] * (times + 1)
    assert found.attempts == times + 1
    assert made.resubmitted("failed" if failed else "left") == times
    assert made.resubmitted("left" if failed else "failed") == 0
    assert leaders[0].got[0][1] == leaders[times].got[0][1]


async def test_request_is_poison_when_two_leaders_failed_with_it() -> None:
    made, leaders = pool_of(3)
    for leader in leaders:
        leader.answers = [lost()]
    with pytest.raises(errors.PoisonError, match="2 leaders failed"):
        await predict(made.pool)
    assert sum(leader.sent() for leader in leaders) == 2
    assert leaders[2].sent() == 0, "two failures are enough"


async def test_request_waits_for_the_end_of_a_link_that_sends_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    made, (first, second) = pool_of(2)

    def connected() -> Link:
        raise lost(failed=False)

    monkeypatch.setattr(first, "connected", connected)
    asyncio.get_running_loop().call_soon(first.is_lost)
    await predict(made.pool)
    assert second.sent() == 1


async def test_requests_wait_until_a_leader_that_has_just_started_is_ready() -> None:
    made, leaders = pool_of(2)
    for leader in leaders:
        leader.is_lost()
    waiting = asyncio.gather(*(predict(made.pool) for _ in range(5)), admit(made.pool))
    await asyncio.sleep(0.02)
    leader.tells(ready=False)
    await asyncio.sleep(0.02)
    assert not leader.got
    leader.tells(ready=True)
    await waiting
    assert leader.sent() == 5


async def test_requests_wait_for_the_workers_of_a_lost_leader_when_the_other_has_lost_its_own_to_it() -> None:
    made, (first, second) = pool_of(2)
    first.is_lost()
    assert (await predict(made.pool)).attempts == 1
    first.tells(ready=True)
    second.tells(ready=False)  # its workers have moved to the first leader, longer than the grace time ago
    first.is_lost()
    second.answers = [errors.NoReplicaError("a stage has had no replica")]
    waiting = asyncio.gather(predict(made.pool), admit(made.pool))
    await asyncio.sleep(0.02)
    assert second.sent() == 1, "it would reject them"
    second.answers.clear()
    second.tells(ready=True)
    await waiting
    assert second.sent() == 2


async def test_request_returns_to_a_leader_that_has_rejected_it_when_the_workers_do() -> None:
    made, (first, second) = pool_of(2)
    first.answers = [errors.NoReplicaError("a stage has had no replica")]
    second.answers = [lost(failed=False)]
    assert (await predict(made.pool)).attempts == 2
    assert [first.sent(), second.sent()] == [2, 1]


async def test_request_is_rejected_after_the_grace_time_when_no_leader_starts() -> None:
    made, _ = pool_of(2, grace_s=0.1, connected=False)
    began_s = time.monotonic()
    with pytest.raises(errors.NotReadyError, match=r"no leader has been reachable for 0\.1 s") as caught:
        await predict(made.pool)
    assert time.monotonic() - began_s >= 0.1
    assert caught.value.retry_after_s == 1
    with pytest.raises(errors.NotReadyError):
        await admit(made.pool)


async def test_deadline_passes_while_the_request_waits_for_a_leader() -> None:
    made, _ = pool_of(1, grace_s=60, connected=False)
    with pytest.raises(errors.DeadlineError, match="no leader was reachable before the deadline"):
        await predict(made.pool, timeout_s=0.05)


# -- the workers of a leader join another one ------------------------------------------------------------------------------------


async def test_requests_follow_the_workers_to_another_leader() -> None:
    made, (first, second) = pool_of(2)
    first.answers = [asyncio.Event()]
    second.tells(ready=False)
    waiting = asyncio.create_task(predict(made.pool))
    await until(lambda: first.got)
    first.tells(ready=False)
    await asyncio.sleep(0)
    assert not first.withdrawn.done(), "a worker may join again"
    second.tells(ready=True)
    assert (await waiting).attempts == 2
    assert made.resubmitted("left") == 1
    assert (first.sent(), second.sent()) == (1, 1)


# -- a leader rejects ----------------------------------------------------------------------------------------------------------

ELSEWHERE = [
    errors.OverloadedError("full", retry_after_s=0.5),
    errors.NoReplicaError("none"),
    errors.NotReadyError("not yet"),
    errors.DrainingError("stopping"),
]


@pytest.mark.parametrize("rejection", ELSEWHERE, ids=lambda each: each.reason)
async def test_one_other_leader_is_tried_when_the_first_has_no_room(rejection: errors.RequestRejected) -> None:
    made, leaders = pool_of(3)
    leaders[0].answers = [rejection]
    await predict(made.pool)
    await admit(made.pool)
    assert made.resubmitted(rejection.reason) == 1
    for leader in leaders:
        leader.answers, leader.got = [rejection], []
    with pytest.raises(type(rejection)) as caught:
        await predict(made.pool)
    assert caught.value.retry_after_s == rejection.retry_after_s
    assert sum(leader.sent() for leader in leaders) == 2, "overload is not amplified"


async def test_requests_are_refused_before_they_are_decoded_while_leaders_have_no_room() -> None:
    made, leaders = pool_of(1)
    leaders[0].answers = [errors.OverloadedError("full", retry_after_s=0.5)]
    with pytest.raises(errors.OverloadedError):
        await predict(made.pool, timeout_s=3.0)
    refused_s = time.monotonic()
    await admit(made.pool)  # it has more time
    try:
        while True:
            with pytest.raises(errors.OverloadedError, match="full") as caught:
                await made.pool.admit(time.monotonic() + 3.0)
            assert caught.value.retry_after_s == 0.5
    except pytest.fail.Exception:
        assert time.monotonic() - refused_s > 0.01, "a leader may have room again"
    assert leaders[0].sent() == 1
    await predict(made.pool, timeout_s=3.0)


@pytest.mark.parametrize(
    "rejection", [errors.InvalidRequestError("wrong"), errors.PoisonError("bad"), errors.DeadlineError("late")]
)
async def test_no_other_leader_is_tried_when_the_request_itself_is_the_reason(
    rejection: errors.RequestRejected,
) -> None:
    made, leaders = pool_of(2)
    leaders[0].answers = [rejection]
    with pytest.raises(type(rejection)):
        await predict(made.pool)
    assert leaders[1].got == []


# -- draining and unloaded -----------------------------------------------------------------------------------------------------


async def test_admitted_request_goes_to_the_leader_that_drains_when_there_is_no_other() -> None:
    made, [leader] = pool_of(1, grace_s=0.05)
    async with open_request(made.pool):
        leader.tells_draining()
        await predict(made.pool)
    assert leader.sent() == 1
    with pytest.raises(errors.NotReadyError):
        await admit(made.pool)


async def test_leader_that_drains_is_idle_when_no_admitted_request_needs_it() -> None:
    made, (first, second) = pool_of(2)
    await made.pool.wait_idle()
    async with open_request(made.pool):
        first.tells_draining()
        await made.pool.wait_idle()  # the other leader takes it
        second.tells_draining()
        waiting = asyncio.create_task(made.pool.wait_idle())
        await asyncio.sleep(0.01)
        assert not waiting.done()
    await waiting
    assert made.pool.open_requests == 0


async def test_requests_are_rejected_at_once_when_the_model_is_unloaded() -> None:
    made, leaders = pool_of(2, grace_s=60)
    for leader in leaders:
        leader.tells_unloaded()
    for request in (predict, admit):
        with pytest.raises(errors.NotReadyError, match="the model is unloaded"):
            await request(made.pool)
    assert not any(leader.got for leader in leaders)
    assert not made.pool.ready
    loaded = desired(8, "v1")
    leaders[1].tells(desired=loaded, served=loaded, snapshot=leader_state("leader-1").snapshot)
    async with open_request(made.pool):
        await predict(made.pool)


async def test_requests_are_answered_and_followers_of_events_are_ended_when_the_frontend_stops() -> None:
    made, _ = pool_of(2)
    made.pool.stopping = True
    async with open_request(made.pool):
        assert made.pool.open_requests == 1
        await predict(made.pool)
    assert made.pool.ready
    assert made.pool.snapshot().draining


# -- state ---------------------------------------------------------------------------------------------------------------------


async def test_snapshot_is_that_of_the_acting_leader_with_a_line_for_each_leader() -> None:
    made, (first, second, third) = pool_of(3)
    third.is_lost()
    state = leader_state("leader-0")
    first.tells(ready=False)
    second.tells(snapshot=replace(state.snapshot, queue_depth=7))
    found = made.pool.snapshot()
    for leader in (first, second):
        leader.tells_draining()
        leader.is_lost()
    without = made.pool.snapshot()
    assert (without.missing_stages, without.state) == ((0,), "not_ready"), "the leaders were draining, not the frontend"
    assert found.ready
    assert (found.queue_depth, found.leader) == (7, "leader-1")
    assert [each.state for each in found.leaders] == ["not_ready", "ready", "unreachable"]
    assert [each.address for each in found.leaders] == ["10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.1:8002"]


async def test_metrics_count_the_leaders_that_can_be_used() -> None:
    made, leaders = pool_of(2)
    leaders[0].tells_draining()
    value, model = made.metrics.registry.get_sample_value, {"model": MODEL.name}
    values = [value(name, model) for name in ("multiworld_leaders", "multiworld_leaders_configured")]
    states = {state: value("multiworld_service_state", {**model, "state": state}) for state in get_args(ServiceState)}
    assert values == [1, 2]
    assert states == {"ready": 0, "degraded": 1, "not_ready": 0, "unloaded": 0, "draining": 0}


async def test_leader_of_another_model_is_not_accepted() -> None:
    made, (first, second) = pool_of(2)
    made.pool.check_model(MODEL, first)
    made.pool.check_model(replace(MODEL, version="v2"), second)
    for other in (
        replace(MODEL, name="n"),
        replace(MODEL, labels=("a", "c")),
        image_classifier("m", "v1", ("a", "b"), ImageSizes(8, 8)),
    ):
        with pytest.raises(ValueError, match=r"serves .*(start the leader with|name the leaders of each model)"):
            made.pool.check_model(other, second)
    assert made.pool.model.result() == MODEL


# -- versions ------------------------------------------------------------------------------------------------------------------


async def test_first_ready_leader_loads_a_version_and_the_others_are_told() -> None:
    made, (first, second, third) = pool_of(3)
    first.tells(ready=False)
    third.is_lost()
    assert await made.pool.load_version("v2") == desired(1, "v2").version
    assert second.operations == ["load-version"]
    assert first.told[-1] == desired(1, "v2")
    third.tells()
    assert third.told[-1] == desired(1, "v2")
    assert (await predict(made.pool)).version == "v2"
    first.tells(ready=True)
    assert (await predict(made.pool)).version == "v2", "it has not followed yet"
    assert made.pool.version == desired(1, "v2").version
    first.serves(first.told[-1])
    await predict(made.pool)
    assert (first.sent(), second.sent(), third.sent()) == (1, 2, 0)


async def test_requests_wait_for_a_leader_that_follows_when_the_acting_one_is_lost() -> None:
    made, (first, second) = pool_of(2)
    await made.pool.load_version("v2")
    first.is_lost()
    waiting = asyncio.create_task(predict(made.pool))
    await asyncio.sleep(0.02)
    assert not second.got
    first.tells(ready=False)
    assert first.told[-1] == desired(1, "v2"), "it has started anew"
    second.serves(second.told[-1])
    assert (await waiting).version == "v2"


async def test_leader_that_cannot_follow_serves_only_when_no_other_leader_does() -> None:
    made, (first, second) = pool_of(2)
    await made.pool.load_version("v2")
    second.tells(desired=second.told[-1], obstacle="cannot serve version v2 of the other leaders: no file")
    await predict(made.pool)
    assert [leader.state for leader in made.pool.snapshot().leaders] == ["ready", "not_ready"]
    assert made.pool.snapshot().reasons == ("leader leader-1 cannot serve version v2 of the other leaders: no file",)
    first.is_lost()
    assert (await predict(made.pool)).version == "v1"
    assert (first.sent(), second.sent()) == (1, 1)


async def test_leader_that_restarts_with_other_content_gets_nothing_while_another_has_the_first() -> None:
    made, (first, second) = pool_of(2)
    other = FIRST._replace(version=FIRST.version._replace(digest="of a file that was overwritten"))
    first.is_lost()
    first.tells(desired=other, served=other)
    assert first.told[-1] == FIRST
    await predict(made.pool)
    assert (first.sent(), second.sent()) == (0, 1)
    first.tells(desired=FIRST, obstacle="what it reads has another digest")
    second.is_lost()
    second.tells(desired=other, served=other)
    await predict(made.pool)
    assert first.sent() == 1, "no leader has the first content any more"
    second.is_lost()
    second.tells(desired=FIRST, served=FIRST, ready=False)
    await predict(made.pool)
    assert first.sent() == 2, "the second one has no workers yet"
    second.tells(ready=True)
    await predict(made.pool)
    assert (first.sent(), second.sent()) == (2, 2)


async def test_decisions_on_both_sides_of_a_cut_network_end_with_one() -> None:
    made, (first, second) = pool_of(2)
    first.is_lost()
    second.serves(desired(1, "v3"))
    first.serves(desired(1, "v2"))
    assert first.told[-1] == desired(1, "v3")
    assert made.pool.version == desired(1, "v3").version


async def test_operation_says_that_the_leader_was_lost() -> None:
    made, [leader] = pool_of(1)
    leader.refuses = {"v2": lost(), "unload": lost(), "rolling-restart": lost()}
    for operation in (made.pool.load_version("v2"), made.pool.unload(), anext(made.pool.restart_workers())):
        with pytest.raises(errors.NotReadyError, match="leader-0 was lost during"):
            await operation
        leader.tells()
    made, _ = pool_of(1, connected=False)
    with pytest.raises(errors.NotReadyError, match="no leader is connected"):
        await made.pool.unload()


async def test_next_leader_performs_an_operation_when_the_acting_one_is_lost_unless_steps_were_reported() -> None:
    made, (first, second) = pool_of(2)
    first.refuses = {"v2": lost(), "rolling-restart": lost()}
    assert await made.pool.load_version("v2") == desired(1, "v2").version
    assert second.operations == ["load-version"]
    first.serves(desired(1, "v2"))
    with pytest.raises(errors.NotReadyError, match="leader-0 was lost during"):
        await anext(made.pool.restart_workers())
    assert second.operations == ["load-version"]


async def test_acting_leader_unloads_the_model_and_the_others_are_told() -> None:
    made, (first, second) = pool_of(2)
    await made.pool.unload()
    first.tells_unloaded()
    assert second.told[-1] == FIRST._replace(revision=1, unloaded=True)
    assert (first.operations, second.operations) == (["unload"], [])


# -- two leaders with one name -------------------------------------------------------------------------------------------------


async def test_leaders_with_one_name_are_told_apart_by_address_and_both_used() -> None:
    made, leaders = pool_of(2)
    for leader in leaders:
        leader.name = "twin"
        leader.tells()
    found = made.pool.snapshot()
    names = ["twin@10.0.0.1:8000", "twin@10.0.0.1:8001"]
    assert [each.name for each in found.leaders] == names
    assert found.leader == names[0]
    await predict(made.pool)
    assert [leader.sent() for leader in leaders] == [1, 0]
    leaders[1].is_lost()
    assert [each.name for each in made.pool.snapshot().leaders] == names, "the name does not change with its link"
    leaders[1].name = "other"
    assert [each.name for each in made.pool.snapshot().leaders] == ["twin", "other"]
