"""The decoding threads: their queue, and a shutdown that a blocked thread delays as little as the exit of the process."""

import asyncio
import threading

import pytest

from multiworld_serving.server.daemon_threads import DaemonThreads
from multiworld_serving.server.errors import OverloadedError


async def test_exit_returns_when_a_decode_blocks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("multiworld_serving.server.daemon_threads._CLOSE_S", 0.05)
    begun, release = threading.Event(), threading.Event()

    def stuck() -> None:
        begun.set()
        release.wait()

    pool = DaemonThreads(2, "decode")
    try:
        async with asyncio.timeout(60), pool:
            decoding = asyncio.create_task(pool.run(stuck))
            await asyncio.to_thread(begun.wait, 60)
            decoding.cancel()
        assert "1 calls on threads decode are blocked" in caplog.text
    finally:
        release.set()


async def test_thread_stays_busy_when_its_decode_is_cancelled() -> None:
    release, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        release.wait()

    try:
        async with DaemonThreads(1, "decode", max_waiting=1) as pool:
            running = asyncio.create_task(pool.run(work))
            await asyncio.to_thread(begun.wait)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            waiting = asyncio.create_task(pool.run(lambda: "next"))
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError):
                await pool.run(lambda: "too early")
            release.set()
            assert await waiting == "next"
    finally:
        release.set()
