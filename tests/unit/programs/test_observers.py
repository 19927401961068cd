"""Failing observers do not affect the observed code."""

import logging
import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from multiworld_serving.common.metrics import guarded
from multiworld_serving.server import main as server_main
from multiworld_serving.server.settings import ServeSettings


class Observer:
    def __init__(self) -> None:
        self.calls = 0
        self.name = "me"

    def saw(self, what: str, *, fails: bool = False) -> str:
        self.calls += 1
        if fails:
            raise BrokenPipeError(what)
        return what

    def heard(self) -> None:
        raise ValueError("nothing")


def test_guarded_observer_behaves_like_the_original() -> None:
    observer = guarded(Observer())
    assert (observer.name, observer.saw("it")) == ("me", "it")


def test_failing_observer_is_logged_once_and_called_again(caplog: pytest.LogCaptureFixture) -> None:
    observer = guarded(Observer())
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


def test_guarded_observer_does_not_swallow_cancellation() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded(stop)()


def snapshot(state: str) -> Any:
    replica = SimpleNamespace(state=state, worker="w")
    return SimpleNamespace(spares=(), stages=(SimpleNamespace(index=0, replicas=(replica,)),), ready=state == "ready")


class Supervisor:
    def __init__(self) -> None:
        self.known: list[str] = []

    def proven(self, worker: str) -> None:
        self.known.append(worker)

    def present(self, names: object) -> None:
        pass


def closed_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, _: str) -> int:
            raise BrokenPipeError("nobody reads")

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stdout", Closed())


def test_supervisor_is_notified_when_standard_output_is_a_broken_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServeSettings(token=SecretStr("a-secret-of-this-test"), join_port=0)
    with socket.create_server(("127.0.0.1", 0)) as one:
        progress = server_main._StartupReporter(settings, {"http_port": one, "metrics_port": one})
    progress.workers = supervisor = Supervisor()
    watchers = server_main._SnapshotListeners(progress.show)
    watchers.add(progress.tell_supervisor)
    closed_pipe(monkeypatch)
    watchers.tell(snapshot("loading"))
    watchers.tell(snapshot("ready"))
    assert supervisor.known == ["w"]
