"""Notifications to systemd, received by a socket of the test, and stop signals: the first one stops a program, a later one ends it."""

import asyncio
import os
import select
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from multiworld_serving.common.config import process
from multiworld_serving.common.config.process import notify, notify_systemd, on_stop_signal
from tests.bundles import PREVIEW
from tests.nursery import fork_program

PATIENCE_S = 60.0


def receiver(address: str) -> socket.socket:
    """A socket that receives the notifications for this address."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.bind("\0" + address[1:] if address.startswith("@") else address)
    made.settimeout(PATIENCE_S)
    return made


def next_of(receiving: socket.socket) -> str:
    return receiving.recv(100).decode()


@pytest.mark.parametrize("is_path", [True, False], ids=["path", "abstract"])
async def test_ready_watchdog_and_stopping_are_sent_while_a_service_runs(
    is_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = str(tmp_path / "notify") if is_path else f"@multiworld-test-{os.getpid()}"
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    with receiver(address) as systemd:
        async with notify_systemd():
            assert next_of(systemd) == "READY=1"
            for _ in range(3):
                await asyncio.sleep(0.01)  # the watchdog messages come from this loop
                assert await asyncio.to_thread(next_of, systemd) == "WATCHDOG=1"
            while select.select([systemd], [], [], 0)[0]:  # the queue has room for 10 messages
                assert next_of(systemd) == "WATCHDOG=1"
        assert next_of(systemd) == "STOPPING=1"


async def test_ready_is_sent_when_the_queue_of_the_supervisor_is_full(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"@multiworld-test-{os.getpid()}"
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setattr(process, "SEND_TIMEOUT_S", PATIENCE_S)
    with receiver(address) as supervisor:
        queued = 0
        while notify("WATCHDOG=1"):
            queued += 1
        assert "cannot notify the supervisor of WATCHDOG=1" in caplog.text
        reader = threading.Timer(0.1, lambda: [next_of(supervisor) for _ in range(queued)])
        reader.start()
        async with notify_systemd():
            reader.join()
            assert await asyncio.to_thread(next_of, supervisor) == "READY=1"


SERVE = ["serve", "--model", str(PREVIEW), "--stages", "1", "--replicas", "1"]


@pytest.mark.parametrize(
    ("program", "is_ready"),
    [(["worker", "--leader", "127.0.0.1:1"], False), ([*SERVE, "--external-workers"], False), (SERVE, True)],
    ids=["worker", "serve without workers", "serve"],
)
def test_program_notifies_systemd_when_it_serves(program: list[str], is_ready: bool, tmp_path: Path) -> None:
    ports = ["--http-port", "0", "--join-port", "0", "--admin-port", "0"] if program[0] == "serve" else []
    told: dict[str, Any] = {
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
        "WATCHDOG_USEC": "200000",
        "MULTIWORLD_TOKEN": "a-secret-of-this-test",
    }
    with open(os.devnull, "wb") as devnull, receiver(told["NOTIFY_SOCKET"]) as systemd:
        running = fork_program([*program, *ports], devnull.fileno(), **told)
        try:
            assert [next_of(systemd) for _ in range(3)] == ["WATCHDOG=1"] * 3
            while is_ready and next_of(systemd) != "READY=1":
                pass
            assert {next_of(systemd) for _ in range(20)} == {"WATCHDOG=1"}
        finally:
            running.kill()
            running.wait()


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
