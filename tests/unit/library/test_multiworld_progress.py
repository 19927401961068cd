"""Event loop progress in heartbeats, and its evaluation by peers."""

import pytest

from multiworld.config import HeartbeatConfig
from multiworld.control.progress import StallClock


def test_peer_is_stalled_while_its_count_stays() -> None:
    clock = StallClock()
    for now_s in range(5):
        clock.on_heartbeat(7, float(now_s), max_gap_s=2.0)
    assert clock.stalled_s == 4.0
    clock.on_heartbeat(8, 5.0, max_gap_s=2.0)
    assert clock.stalled_s == 0.0


def test_long_gap_counts_little_when_the_whole_process_was_stopped() -> None:
    clock = StallClock()
    clock.on_heartbeat(7, 0.0, max_gap_s=0.4)
    clock.on_heartbeat(7, 30.0, max_gap_s=0.4)
    assert clock.stalled_s == 0.4


def test_stall_timeout_shorter_than_a_few_heartbeats_is_refused() -> None:
    assert HeartbeatConfig(0.2, 1.0, 0.8).loop_stall_timeout_s == 0.8
    with pytest.raises(ValueError, match=r"at least 4 times heartbeat_interval_s \(0\.2\), got 0\.7"):
        HeartbeatConfig(0.2, 1.0, 0.7)
