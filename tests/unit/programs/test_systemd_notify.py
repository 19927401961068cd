"""Notifications to systemd, received by a socket of the test."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multiworld_serving.common.config.process import notify_systemd
from tests.bundles import PREVIEW
from tests.nursery import fork_program

PATIENCE_S = 60.0


class Systemd:
    """Receives notifications."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind("\0" + address[1:] if address.startswith("@") else address)
        self._sock.settimeout(PATIENCE_S)

    def next(self) -> str:
        return self._sock.recv(100).decode()

    def close(self) -> None:
        self._sock.close()


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Systemd]:
    made = Systemd(str(tmp_path / "notify") if request.param == "path" else f"@multiworld-test-{os.getpid()}")
    monkeypatch.setenv("NOTIFY_SOCKET", made.address)
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    yield made
    made.close()


async def test_ready_watchdog_and_stopping_are_sent_while_a_service_runs(systemd: Systemd) -> None:
    async with notify_systemd():
        assert systemd.next() == "READY=1"
        for _ in range(3):
            await asyncio.sleep(0.01)  # the watchdog messages come from this loop
            assert await asyncio.to_thread(systemd.next) == "WATCHDOG=1"
    told = await asyncio.to_thread(systemd.next)
    while told == "WATCHDOG=1":
        told = await asyncio.to_thread(systemd.next)
    assert told == "STOPPING=1"


@pytest.mark.parametrize(
    "program",
    [["worker", "--leader", "127.0.0.1:1"], ["serve", "--external-workers", "--model", str(PREVIEW)]],
    ids=["worker", "serve"],
)
def test_program_notifies_systemd_when_it_is_ready(program: list[str], tmp_path: Path) -> None:
    systemd = Systemd(str(tmp_path / "notify"))
    ports = ["--http-port", "0", "--join-port", "0", "--metrics-port", "0"] if program[0] == "serve" else []
    told: dict[str, Any] = {
        "NOTIFY_SOCKET": systemd.address,
        "WATCHDOG_USEC": "200000",
        "MULTIWORLD_TOKEN": "a-secret-of-this-test",
    }
    with open(os.devnull, "wb") as devnull:
        process = fork_program([*program, *ports], devnull.fileno(), **told)
    try:
        assert [systemd.next() for _ in range(3)] == ["READY=1", "WATCHDOG=1", "WATCHDOG=1"]
    finally:
        process.kill()
        process.wait()
        systemd.close()
