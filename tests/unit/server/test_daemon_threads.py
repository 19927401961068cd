"""The decoding threads: their queue, and a shutdown that a blocked thread delays as little as the exit of the process."""

import asyncio
from collections.abc import Iterator

import pytest

from multiworld_serving.common.daemon_threads import DaemonThreads
from multiworld_serving.common.service.errors import OverloadedError
from tests.waiting import Gate


@pytest.fixture
def stuck() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


async def test_exit_returns_when_a_decode_blocks(
    stuck: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("multiworld_serving.common.daemon_threads._CLOSE_S", 0.05)
    async with asyncio.timeout(60), DaemonThreads(2, "decode") as pool:
        decoding = asyncio.create_task(pool.run(stuck))
        await stuck.until_begun()
        decoding.cancel()
    assert "1 calls on threads decode are blocked" in caplog.text


async def test_thread_stays_busy_when_its_decode_is_cancelled(stuck: Gate) -> None:
    async with DaemonThreads(1, "decode", max_waiting=1) as pool:
        running = asyncio.create_task(pool.run(stuck))
        await stuck.until_begun()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        waiting = asyncio.create_task(pool.run(lambda: "next"))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await pool.run(lambda: "too early")
        stuck.open()
        assert await waiting == "next"
