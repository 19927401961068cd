"""SIGTERM and SIGINT: the first one stops a program in order, a later one ends it."""

import asyncio
import signal

import pytest

from multiworld_serving.common.config import process
from multiworld_serving.common.config.process import on_stop_signal


async def receive(*signals: signal.Signals) -> int:
    """How often the program is told to stop after it received these signals."""
    stops = 0

    def stop() -> None:
        nonlocal stops
        stops += 1

    on_stop_signal(stop)
    for signum in signals:
        signal.raise_signal(signum)
    async with asyncio.timeout(30):
        while not stops:  # noqa: ASYNC110 - the handler has no event of its own
            await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    return stops


def test_signals_at_the_same_time_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SAME_STOP_S", 60.0)
    assert asyncio.run(receive(signal.SIGTERM, signal.SIGINT, signal.SIGINT)) == 1


def test_later_signal_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SAME_STOP_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(receive(signal.SIGTERM, signal.SIGINT))
