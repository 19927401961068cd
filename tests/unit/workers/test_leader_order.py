"""Which leader a worker obeys, and what the leaders are told about what it holds."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from multiworld_serving.models.bundle.files import read_bundle
from multiworld_serving.models.bundle.stage import BundleStageSpec
from multiworld_serving.server.leader.versions.stage_plan import make_bundle_plan
from multiworld_serving.workers import leader_order
from multiworld_serving.workers.leader_order import LeaderOrder
from multiworld_serving.workers.stage_loader import AssignedStage
from tests.bundles import PREVIEW

FIRST, LAST = (plan.spec for plan in make_bundle_plan(read_bundle(PREVIEW), 2))


def stage(version: int, spec: BundleStageSpec, digest: str) -> AssignedStage:
    return cast(AssignedStage, SimpleNamespace(key=(version, spec.index), spec=spec, digest=digest))


def test_worker_obeys_the_first_leader_that_it_is_linked_to() -> None:
    order = LeaderOrder()
    with order.linked(1, "second") as second:
        assert second.obeyed == ""
        with order.linked(0, "first") as first, order.linked(2, "third") as third:
            assert (first.obeyed, second.obeyed, third.obeyed) == ("", "first", "first")
            [metric] = order.collect()
            assert {each.labels["leader"]: each.value for each in metric.samples} == {
                "first": 1,
                "second": 0,
                "third": 0,
            }
        assert second.obeyed == ""


def test_worker_obeys_a_leader_that_can_serve_and_the_first_one_if_none_can() -> None:
    order = LeaderOrder()
    with order.linked(0, "first") as first:
        first.unable = True
        assert first.obeyed == "", "it serves while nobody else does"
        assert order.obeyed(1) == "", "the second leader may place the worker when it joins"
        with order.linked(1, "second") as second:
            assert (first.obeyed, second.obeyed) == ("second", "")
            assert second.accepts("new")
            assert not first.accepts("other")
            second.unable = True
            assert (first.obeyed, second.obeyed) == ("", "first")
            first.unable = second.unable = False
            assert (first.obeyed, second.obeyed) == ("", "first")


def test_leader_that_is_not_obeyed_may_assign_only_what_the_worker_holds() -> None:
    order = LeaderOrder()
    with order.linked(1, "second") as second:
        assert second.accepts("one")
        second.assigned(stage(1, FIRST, "one"))
        with order.linked(0, "first") as first:
            assert first.accepts("two")
            first.assigned(stage(4, FIRST, "two"))
            assert second.accepts("one")
            assert second.accepts("two")
            assert not second.accepts("three")
            second.unloaded(1)
            assert not second.accepts("one")


def test_leaders_are_told_what_the_obeyed_one_has_assigned() -> None:
    order = LeaderOrder()
    assert order.parts == ""
    with order.linked(1, "second") as second:
        second.assigned(stage(1, FIRST, "one"))
        with order.linked(0, "first") as first:
            assert order.parts == FIRST.part, "the first leader is told where it finds the worker"
            first.assigned(stage(1, LAST, "two"))
            assert order.parts == LAST.part
        assert order.parts == FIRST.part
        second.assigned(stage(2, LAST, "three"))
        assert order.parts == ",".join(sorted((FIRST.part, LAST.part)))
    assert order.parts == ""


def test_later_leader_has_to_join_again_when_the_obeyed_one_has_assigned_a_further_stage_but_not_for_another_version() -> (
    None
):
    order, left = LeaderOrder(), list[str]()
    with order.linked(0, "first") as first, order.linked(1, "second") as second:
        second.leave = lambda: left.append("second")
        second.assigned(stage(1, FIRST, "one"))
        for version in (1, 2):
            first.assigned(stage(version, FIRST, f"version {version}"))
            first.loaded()
        assert not left
        first.assigned(stage(1, LAST, "two"))
        first.loaded()
        assert left == ["second"]


async def test_later_leader_is_asked_when_the_earlier_one_has_assigned_a_stage_or_cannot_be_joined() -> None:
    order = LeaderOrder()
    with order.attempt(0), order.attempt(1):
        asking = asyncio.create_task(order.until_earlier_leaders_assigned(1))
        await order.until_earlier_leaders_assigned(0)
        await asyncio.sleep(0)
        assert not asking.done()
        with order.linked(0, "first") as first:
            first.assigned(stage(1, FIRST, "one"))
        await asking
    with order.attempt(1):
        with order.attempt(0):
            asking = asyncio.create_task(order.until_earlier_leaders_assigned(1))
            await asyncio.sleep(0)
            assert not asking.done()
        await asking


async def test_leader_that_assigns_nothing_delays_the_later_ones_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader_order, "EARLIER_LEADERS_S", 0.01)
    order = LeaderOrder()
    with order.attempt(0), order.attempt(1):
        async with asyncio.timeout(60):
            await order.until_earlier_leaders_assigned(1)
