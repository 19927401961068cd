"""Isolation: suspect samples are computed one by one, so that only the poison is refused."""

from __future__ import annotations

from multiworld_serving.server.scheduling.actions import FreeBatch, SendBatch
from tests.unit.scheduling.scheduler_harness import SchedulerHarness, answered, of, only, rejected, sends


def _run(driver: SchedulerHarness, pending: list[SendBatch], poison: set[int]) -> tuple[list[int], dict[int, str], int]:
    """Simulate; a replica that computes a poison request dies and is replaced. Returns answered, refused and the number of deaths."""
    good: list[int] = []
    bad: dict[int, str] = {}
    deaths = 0
    dead: set[str] = set()
    while pending:
        send = pending.pop(0)
        if send.replica in dead:
            continue
        if poison & set(send.requests):
            deaths += 1
            dead.add(send.replica)
            actions = driver.broken(send.replica)
            actions += driver.ready(f"{send.replica}+", send.stage)
        else:
            actions = driver.done(send, after_s=0.001)
        good += answered(actions)
        bad |= rejected(actions)
        pending += sends(actions)
    return sorted(good), bad, deaths


def test_only_the_poison_request_is_refused_when_it_kills_every_replica() -> None:
    driver = SchedulerHarness(replicas=2, max_batch_size=4, batch_timeout_s=1.0)
    good, bad, deaths = _run(driver, sends(driver.arrive(12)), poison={6})
    assert bad == {6: "poison"}
    assert good == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12]
    assert deaths == 3, "exactly max_attempts worlds"


def test_batch_is_split_when_it_has_broken_all_but_one_of_its_worlds() -> None:
    driver = SchedulerHarness(replicas=4, max_batch_size=3, batch_timeout_s=1.0, max_attempts=3)
    first = only(driver.arrive(3), SendBatch)
    second = only(driver.broken(first.replica), SendBatch)
    actions = driver.broken(second.replica)
    assert of(actions, FreeBatch) == [FreeBatch(first.batch)]
    alone = only(actions, SendBatch)
    assert (alone.requests, alone.isolated, alone.stage, alone.kind, alone.attempt) == ((1,), True, 0, "first", 3)


def test_suspect_is_alone_on_its_link_when_other_batches_wait() -> None:
    driver = SchedulerHarness(replicas=4, max_batch_size=1, window=2, max_attempts=2)
    first = only(driver.arrive(), SendBatch)
    alone = only(driver.broken(first.replica), SendBatch)
    assert alone.isolated
    others = sends(driver.arrive(20))
    assert len(others) == 4, "two other replicas, each with a window of two"
    assert all(send.replica != alone.replica for send in others)


def test_no_further_suspect_is_sent_while_one_waits_at_a_later_stage() -> None:
    driver = SchedulerHarness(stages=2, replicas=1, window=1, max_batch_size=3, batch_timeout_s=1.0, max_attempts=2)
    driver.arrive(3)
    driver.broken("s0r0")
    first = only(driver.ready("s0r1"), SendBatch)
    second = sends(driver.done(first))
    assert [(send.stage, send.requests) for send in second] == [(1, (1,)), (0, (2,))]
    assert sends(driver.done(second[1])) == [], "the second waits for stage 1"
    assert [(send.stage, send.requests) for send in sends(driver.done(second[0]))] == [(1, (2,)), (0, (3,))]


def test_isolation_alternates_with_ordinary_batches_on_a_single_replica() -> None:
    driver = SchedulerHarness(replicas=1, max_batch_size=3, window=1, max_attempts=2, batch_timeout_s=1.0)
    driver.arrive(3)
    driver.broken("s0r0")
    pending = sends(driver.ready("s0r1"))
    driver.arrive(9)
    turns = [send.isolated for send in pending]
    while pending:
        pending = sends(driver.done(pending.pop()))
        turns += [send.isolated for send in pending]
    assert turns == [True, False, True, False, True, False]


def test_innocent_suspect_is_rerouted_when_it_has_not_broken_enough_worlds() -> None:
    """Isolated because the stage raised twice; a world that breaks afterwards is its first."""
    driver = SchedulerHarness(replicas=3)
    first = only(driver.arrive(), SendBatch)
    retry = only(driver.failed(first), SendBatch)
    alone = only(driver.failed(retry), SendBatch)
    again = only(driver.broken(alone.replica), SendBatch)
    assert (again.isolated, again.kind) == (True, "reroute")
    assert answered(driver.done(again)) == [1]


def test_suspect_is_not_blamed_when_its_worker_leaves() -> None:
    driver = SchedulerHarness(replicas=4, max_attempts=2)
    alone = only(driver.broken(only(driver.arrive(), SendBatch).replica), SendBatch)
    assert alone.isolated
    again = only(driver.broken(alone.replica, "left"), SendBatch)
    assert again.isolated
    assert answered(driver.done(again)) == [1]
