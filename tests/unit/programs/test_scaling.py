"""Autoscaling: when workers are started and stopped, and what happens when that fails."""

import asyncio
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from multiworld_serving.common.config.process import notify
from multiworld_serving.common.service.capacity_report import CAPACITY_FIELD, CapacityReport
from multiworld_serving.common.settings.serve import ServeSettings
from multiworld_serving.server.supervisor.notify import NotifyListener
from multiworld_serving.server.supervisor.scaling.autoscaler import Autoscaler
from multiworld_serving.server.supervisor.scaling.policy import Grow, Limits, ScalingPolicy, Stop
from tests.waiting import until

LIMITS = Limits(least=4, most=10, replicas=2, down_after_s=60.0)


def report(wanted: Sequence[float], *serving: Sequence[str]) -> CapacityReport:
    return CapacityReport(tuple(wanted), tuple(tuple(names) for names in serving))


def experienced() -> ScalingPolicy:
    """A policy that has seen no load for long enough."""
    policy = ScalingPolicy(LIMITS)
    assert policy.decide([report((0.0, 0.0), "ac", "bd")], "abcd", -LIMITS.down_after_s) is None
    return policy


def test_no_worker_is_stopped_before_the_load_of_the_whole_time_is_known() -> None:
    policy, low = ScalingPolicy(LIMITS), report((1.0, 1.0), "ace", "bdf")
    assert policy.decide([None], "abcdef", 0.0) is None
    assert policy.decide([low], "abcdef", 10.0) is None
    assert policy.decide([low], "abcdef", 69.0) is None
    assert isinstance(policy.decide([low], "abcdef", 70.0), Stop)


def test_workers_are_started_at_once_when_the_load_rises() -> None:
    policy, workers = experienced(), "abcd"
    assert policy.decide([report((0.5, 0.5), "ac", "bd")], workers, 0.0) is None
    assert policy.decide([report((2.5, 3.5), "ac", "bd")], workers, 0.5) == Grow(7)


def test_never_more_workers_than_allowed_and_never_fewer_than_redundancy_needs() -> None:
    policy = experienced()
    assert policy.decide([report((20.0, 20.0), "ac", "bd")], "abcd", 0.0) == Grow(10)
    assert experienced().decide([report((0.0, 0.0), "ac", "bd")], "abcd", 0.0) is None
    assert experienced().decide([report((0.0, 0.0), "ac", "b")], "abc", 0.0) == Grow(4)


def test_a_worker_is_stopped_only_after_the_need_has_been_low_for_the_whole_time() -> None:
    policy, workers = experienced(), "abcdef"
    high, low = (report(wanted, "ace", "bdf") for wanted in ((3.0, 3.0), (1.0, 1.0)))
    assert policy.decide([high], workers, 0.0) is None
    assert policy.decide([low], workers, 59.0) is None
    assert policy.decide([high], workers, 59.5) is None
    assert policy.decide([low], workers, 119.0) is None
    assert isinstance(policy.decide([low], workers, 120.0), Stop)


def test_no_stage_falls_below_redundancy_when_workers_have_not_joined() -> None:
    """Six workers run for a need of four, but two are not in service: stopping another one would leave a stage with one."""
    assert experienced().decide([report((0.0, 0.0), "ac", "bd")], "abcdef", 0.0) is None


def test_a_worker_is_not_stopped_when_no_leader_has_it_or_a_leader_does_not_report() -> None:
    low, lacking, standby = (report((0.0, 0.0), *names) for names in (("ace", "bd"), ("ac", "bd"), ("", "")))
    assert experienced().decide([low, standby], "abcde", 0.0) == Stop("e")
    assert experienced().decide([lacking, standby], "abcde", 0.0) is None
    assert experienced().decide([low, None], "abcde", 0.0) is None
    assert experienced().decide([None, None], "abcde", 0.0) is None


def test_supervisor_keeps_the_last_report_of_a_leader_until_it_is_old_or_the_leader_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, last = report((1.5,), ["local-0"]), report((2.5,), ["local-0"])
    with NotifyListener() as listener:
        monkeypatch.setenv("NOTIFY_SOCKET", listener.environment["NOTIFY_SOCKET"])
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        for text in (first.to_json(), last.to_json(), last.to_json()[:-3]):
            notify(CAPACITY_FIELD + text)
        notify("WATCHDOG=1")
        listener.silent_s(os.getpid())  # receives what has arrived
        assert listener.capacity(os.getpid(), max_age_s=60.0) == last
        assert listener.capacity(os.getpid(), max_age_s=-1.0) is None
        listener.forget(os.getpid())
        assert listener.capacity(os.getpid(), max_age_s=60.0) is None


class Processes:
    """A supervisor whose processes exist only here, and the reports of a leader."""

    def __init__(self, workers: int, first: CapacityReport) -> None:
        self.slots = list(range(workers))
        self.reports = [first]
        self.failures = 0
        self.stopping: list[int] = []
        self.may_end = asyncio.Event()

    @property
    def restarts(self) -> dict[int, int]:
        return dict.fromkeys(self.slots, 0)

    def capacity(self, _pid: int, _max_age_s: float) -> CapacityReport:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the report cannot be read")
        return self.reports[-1]

    def add(self) -> int:
        self.slots.append(next(slot for slot in range(100) if slot not in self.slots))
        return self.slots[-1]

    async def remove(self, slot: int) -> None:
        self.stopping.append(slot)
        await self.may_end.wait()
        self.slots.remove(slot)


def scaler(processes: Any) -> Autoscaler:
    """An autoscaler of one stage."""
    leaders: Any = SimpleNamespace(pids={0: 1}, restarts={0: 0})
    policy = ScalingPolicy(Limits(1, 50, 1, down_after_s=0.001))
    return Autoscaler(processes, leaders, processes, "local-", policy)


def serving(wanted: float, workers: int) -> CapacityReport:
    return report((wanted,), [f"local-{slot}" for slot in range(workers)])


async def test_workers_are_started_beside_one_that_is_being_stopped_when_the_load_rises_again() -> None:
    processes = Processes(3, serving(2.0, 3))
    async with scaler(processes):
        await until(lambda: processes.stopping == [2])
        processes.reports.append(serving(3.0, 2))
        await until(lambda: len(processes.slots) == 4)
        processes.may_end.set()
    assert processes.slots == [0, 1, 3]


async def test_one_worker_is_stopped_at_a_time() -> None:
    processes = Processes(5, serving(1.0, 5))
    async with scaler(processes):
        await until(lambda: processes.stopping)
        processes.may_end.set()
        await until(lambda: len(processes.slots) == 1)
    assert processes.stopping == [4, 3, 2, 1]


async def test_failure_is_logged_once_and_scaling_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    processes = Processes(1, serving(3.0, 1))
    processes.failures = 3
    async with scaler(processes):
        await until(lambda: len(processes.slots) == 3)
    failures = [record.message for record in caplog.records if "failed" in record.message]
    assert failures == ["autoscaling failed, trying again"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("2..8", "at least 4 workers; use 4..8"),
        ("8..4", "MIN at most MAX"),
        ("4..2000", "at most 1024"),
        ("4", "pattern"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused_with_what_to_use(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ServeSettings(autoscale=text)


def test_the_service_starts_with_the_least_number_of_workers() -> None:
    settings = ServeSettings(autoscale="5..8")
    assert (settings.num_workers, settings.max_workers) == (5, 8)
    assert (ServeSettings().num_workers, ServeSettings().max_workers) == (4, 4)
