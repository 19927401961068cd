"""Failing observers do not affect the observed code."""

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from multiworld_serving.common.observers import observer, suppress_errors
from multiworld_serving.server import main as server_main


@observer
class Observer:
    def __init__(self) -> None:
        self.calls = 0

    def saw(self, what: str, *, fails: bool = False) -> str | None:
        self.calls += 1
        if fails:
            raise BrokenPipeError(what)
        return what

    def heard(self) -> None:
        raise ValueError("nothing")


def test_failing_observer_is_logged_once_and_called_again(caplog: pytest.LogCaptureFixture) -> None:
    observer = Observer()
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            assert observer.saw("it", fails=True) is None
            observer.heard()
        assert observer.saw("it") == "it"
    assert observer.calls == 4
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "Observer.saw failed",
        "Observer.heard failed",
    ]
    assert "BrokenPipeError: it" in caplog.text


def test_errors_are_suppressed_but_not_the_end_of_the_program() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        suppress_errors(stop)()


def snapshot(state: str) -> Any:
    replica = SimpleNamespace(state=state, worker="w")
    return SimpleNamespace(spares=(), stages=(SimpleNamespace(index=0, replicas=(replica,)),), ready=state == "ready")


def closed_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, _: str) -> int:
            raise BrokenPipeError("nobody reads")

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stdout", Closed())


def test_frontends_are_told_when_the_reporter_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = server_main._StartupReporter()
    listeners = server_main._SnapshotListeners(reporter.show)
    told: list[str] = []
    listeners.add(lambda snapshot: told.append(snapshot.stages[0].replicas[0].state))
    closed_pipe(monkeypatch)
    monkeypatch.setattr(server_main.logger, "info", print)
    listeners.tell(snapshot("loading"))
    listeners.tell(snapshot("ready"))
    assert told == ["loading", "ready"]
