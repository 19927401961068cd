"""Which processes the supervisor kills because they gave no sign of life."""

import contextlib
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from multiworld_serving.deploy.processes import supervisor
from multiworld_serving.deploy.processes.service import _Service
from multiworld_serving.deploy.processes.supervisor import Supervisor
from multiworld_serving.server.settings import ServeSettings

PORTS: dict[str, Any] = {"http_port": 0, "join_port": 0, "metrics_port": 0}


class Child:
    """Stands for a frozen process, in virtual time."""

    pid = 7

    def __init__(self) -> None:
        self.now_s = 100.0
        self.signals: list[tuple[float, int]] = []

    def monotonic(self) -> float:
        return self.now_s

    def silent_s(self, pid: int) -> float:
        """Since 100 s."""
        assert pid == self.pid
        return self.now_s - 100

    def send(self, signum: int) -> None:
        self.signals.append((self.now_s, signum))


async def kills(monkeypatch: pytest.MonkeyPatch, steps_s: list[float]) -> list[tuple[float, int]]:
    """Signals to a process that is silent from 100 s on, checked after each of these pauses; with a limit of 10 s."""
    child, steps = Child(), iter(steps_s)
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=child.monotonic))
    made = Supervisor(lambda _: [], 1, notify=child, blocked_timeout_s=10.0)  # type: ignore[arg-type]
    made._slots[0].child = child  # type: ignore[assignment]

    async def stopped_within(_: object, delay_s: float) -> bool:
        step_s = next(steps, None)
        child.now_s += step_s or 0
        return step_s is None

    monkeypatch.setattr(supervisor, "_set_within", stopped_within)
    await made._kill_blocked()
    return child.signals


async def test_silent_process_is_killed_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await kills(monkeypatch, [1.0] * 11) == [(111.0, signal.SIGKILL)]


async def test_process_is_not_killed_when_the_whole_machine_was_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await kills(monkeypatch, [60.0, *[1.0] * 10]) == []
    assert await kills(monkeypatch, [60.0, *[1.0] * 11]) == [(171.0, signal.SIGKILL)]


def test_hung_worker_is_replaced_after_ten_seconds() -> None:
    settings = ServeSettings(**PORTS, local_token=SecretStr("x"))
    with contextlib.ExitStack() as stack:
        workers = _Service(settings, stack)._workers(None)  # type: ignore[arg-type]
    assert workers._blocked_timeout_s == 10.0
