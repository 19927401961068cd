"""The last incident: what it counts, and when it ends."""

from __future__ import annotations

from multiworld_serving.server.observability.incidents import IncidentLog
from multiworld_serving.server.observability.metrics import Totals


def totals(*, failed: int = 0, resubmitted: int = 0) -> Totals:
    return Totals(answered=0, refused=0, failed=failed, resubmitted=resubmitted, reroutes={})


def test_incident_counts_from_the_failure_until_the_service_is_ready_again() -> None:
    log = IncidentLog(totals())
    log.tick(9.0, "ready", totals(failed=3), 0)
    assert log.last is None
    log.failed(9.5, "s0.r1", "local-1", "exit: it ended the connection")
    log.tick(10.0, "degraded", totals(failed=3, resubmitted=2), 4)
    assert log.last is not None
    assert (log.last.failed, log.last.rerouted, log.last.resubmitted, log.last.ended_unix_s) == (0, 4, 2, None)
    log.tick(12.0, "ready", totals(failed=4, resubmitted=2), 1)
    assert (log.last.failed, log.last.rerouted, log.last.ended_unix_s) == (1, 5, 12.0)
    log.tick(17.0, "ready", totals(failed=5), 0)  # settled
    ended = log.last
    log.tick(18.0, "ready", totals(failed=50), 0)
    assert log.last == ended


def test_failures_during_an_incident_belong_to_it_and_later_ones_start_another() -> None:
    log = IncidentLog(totals())
    log.failed(1.0, "s0.r1", "local-1", "exit")
    log.tick(2.0, "ready", totals(), 0)
    log.failed(3.0, "leader-0 is unreachable", None, "leader-0 is unreachable")
    assert log.last is not None
    assert (log.last.where, log.last.failures, log.last.ended_unix_s) == ("s0.r1", 2, None)
    log.tick(4.0, "ready", totals(), 0)
    log.tick(10.0, "ready", totals(failed=7), 0)
    log.failed(11.0, "s1.r0", "local-2", "hang")
    log.tick(12.0, "degraded", totals(failed=8), 0)
    assert (log.last.where, log.last.failures, log.last.failed) == ("s1.r0", 1, 1)
