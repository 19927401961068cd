"""Autoscaling: when workers are started and stopped, and what happens when the launcher refuses."""

import asyncio
import os
from collections.abc import Sequence

import pytest

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.process import notify
from multiworld_serving.deploy.processes.notify import NotifyListener
from multiworld_serving.deploy.scaling.autoscaler import Autoscaler
from multiworld_serving.deploy.scaling.policy import Grow, Limits, ScalingPolicy, Stop
from multiworld_serving.server.capacity_report import CAPACITY_FIELD, CapacityReport
from multiworld_serving.server.settings import ServeSettings

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


def test_a_worker_is_not_stopped_when_a_leader_lacks_it_or_does_not_report() -> None:
    low, lacking = report((0.0, 0.0), "ace", "bd"), report((0.0, 0.0), "ac", "bd")
    assert experienced().decide([low, low], "abcde", 0.0) == Stop("e")
    assert experienced().decide([low, lacking], "abcde", 0.0) is None
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


class RecordingLauncher:
    """A launcher of processes that exist only here."""

    def __init__(self, workers: int, reports: list[CapacityReport], most: int = 100) -> None:
        self.names = [f"local-{slot}" for slot in range(workers)]
        self.reports = reports
        self.most = most
        self.failures = 0
        self.refusals = 0
        self.stopping: list[str] = []
        self.may_end = asyncio.Event()
        self.changed = asyncio.Condition()

    async def capacity_reports(self) -> list[CapacityReport | None]:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the cluster does not answer")
        return [self.reports[-1]]

    async def workers(self) -> set[str]:
        return set(self.names)

    async def scale_workers(self, count: int) -> None:
        if count > self.most:
            self.refusals += 1
            await self._notify()
            raise UserError(f"no room for {count} workers")
        free = (f"local-{slot}" for slot in range(count) if f"local-{slot}" not in self.names)
        self.names += [next(free) for _ in range(count - len(self.names))]
        await self._notify()

    async def stop_worker(self, name: str) -> None:
        self.stopping.append(name)
        await self._notify()
        await self.may_end.wait()
        self.names.remove(name)
        await self._notify()

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, what: str) -> None:
        """Wait until this expression of the launcher is true."""
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: eval(what, {"self": self}))


def scaler(launcher: RecordingLauncher) -> Autoscaler:
    """An autoscaler of one stage."""
    return Autoscaler(launcher, ScalingPolicy(Limits(1, 50, 1, down_after_s=0.001)))


def serving(wanted: float, workers: int) -> CapacityReport:
    return report((wanted,), [f"local-{slot}" for slot in range(workers)])


async def test_workers_are_started_beside_one_that_is_being_stopped_when_the_load_rises_again() -> None:
    launcher = RecordingLauncher(3, [serving(2.0, 3)])
    async with scaler(launcher):
        await launcher.until("self.stopping == ['local-2']")
        launcher.reports.append(serving(3.0, 2))
        await launcher.until("len(self.names) == 4")
        launcher.may_end.set()
    assert launcher.names == ["local-0", "local-1", "local-3"]


async def test_one_worker_is_stopped_at_a_time() -> None:
    launcher = RecordingLauncher(5, [serving(1.0, 5)])
    async with scaler(launcher):
        await launcher.until("self.stopping")
        launcher.may_end.set()
        await launcher.until("len(self.names) == 1")
    assert launcher.stopping == ["local-4", "local-3", "local-2", "local-1"]


async def test_refusals_and_failures_are_logged_once_and_scaling_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    launcher = RecordingLauncher(1, [serving(3.0, 1)], most=2)
    launcher.failures = 3
    async with scaler(launcher):
        await launcher.until("self.refusals == 3")
        launcher.most = 3
        await launcher.until("len(self.names) == 3")
    failures = [record.message for record in caplog.records if "failed" in record.message]
    assert failures == [
        "autoscaling failed, trying again: the cluster does not answer",
        "autoscaling failed, trying again: no room for 3 workers",
    ]


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
