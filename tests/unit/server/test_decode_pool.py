"""Shutdown of the decoding threads: a blocked thread delays neither the shutdown nor the exit of the process."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from multiworld_serving.server.api.decode_pool import DecodePool

TREE = Path(__file__).parents[3]

EXIT_WITH_BLOCKED_DECODE = """
import asyncio, threading
from multiworld_serving.server.api import decode_pool

async def main():
    decode_pool._CLOSE_S = 0.1
    begun, never = threading.Event(), threading.Event()
    async with decode_pool.DecodePool(threads=1, max_waiting=1) as pool:
        task = asyncio.create_task(pool.run(lambda: (begun.set(), never.wait())))
        await asyncio.to_thread(begun.wait)

asyncio.run(main())
print("closed")
"""


async def test_exit_returns_when_a_decode_blocks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("multiworld_serving.server.api.decode_pool._CLOSE_S", 0.05, raising=False)
    begun, release = threading.Event(), threading.Event()

    def stuck() -> None:
        begun.set()
        release.wait()

    pool = DecodePool(threads=2, max_waiting=2)
    try:
        async with asyncio.timeout(10), pool:
            decoding = asyncio.create_task(pool.run(stuck))
            await asyncio.to_thread(begun.wait, 60)
            decoding.cancel()
        assert "1 images are still being decoded" in caplog.text
    finally:
        release.set()


async def test_exit_waits_when_a_decode_runs() -> None:
    begun, proceed, ended = threading.Event(), threading.Event(), threading.Event()

    def decode() -> None:
        begun.set()
        assert proceed.wait(60)
        ended.set()

    async with DecodePool(threads=1, max_waiting=1) as pool:
        decoding = asyncio.create_task(pool.run(decode))
        await asyncio.to_thread(begun.wait, 60)
        decoding.cancel()
        asyncio.get_running_loop().call_soon(proceed.set)
    assert ended.is_set()


def test_process_exits_when_a_decode_blocks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT_WITH_BLOCKED_DECODE],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=TREE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
