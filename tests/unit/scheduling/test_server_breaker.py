"""Circuit breaker: how long a failing worker is quarantined."""

from hypothesis import given
from hypothesis import strategies as st

from multiworld_serving.server.replicas.breaker import Breaker


def test_quarantine_doubles_from_the_second_failure_on() -> None:
    breaker = Breaker()
    assert [breaker.failed("w", healthy=False, now_s=0.0) for _ in range(9)] == [
        0.0,
        0.5,
        1.0,
        2.0,
        4.0,
        8.0,
        16.0,
        30.0,
        30.0,
    ]
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


@given(st.integers(0, 10_000))
def test_quarantine_and_memory_are_bounded(failures: int) -> None:
    breaker = Breaker()
    for number in range(failures):
        assert 0.0 <= breaker.failed("w" if number % 2 else f"w{number}", healthy=False, now_s=float(number)) <= 30.0
    assert breaker.quarantined(0.0) <= 4096
