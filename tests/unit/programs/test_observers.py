"""Failing observers do not affect the observed code."""

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from multiworld_serving.common.metrics import guarded
from multiworld_serving.server import main as server_main
from multiworld_serving.server.observability.inference_statistics import Statistics
from multiworld_serving.server.observability.metrics import Metrics
from multiworld_serving.server.observability.request_recorder import LocalRequestRecorder, RequestOutcome


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


@pytest.mark.parametrize("broken", ["metrics", "statistics"])
def test_request_is_recorded_without_an_exception_when_an_observer_fails(broken: str) -> None:
    class Failing:
        def __getattr__(self, name: str) -> Any:
            def fail(*_: object, **__: object) -> None:
                raise ValueError(name)

            return fail

    observers: dict[str, Any] = {"metrics": Metrics(), "statistics": Statistics(), broken: Failing()}
    recorder = LocalRequestRecorder("resnet18", **observers)
    assert recorder.request_started("predict") in (0, None)
    recorder.request_ended(0, RequestOutcome("v", "predict", 200, "ok", 0.1, None))
    if broken == "statistics":
        labels = {"model": "resnet18", "version": "v", "protocol": "predict", "code": "200", "reason": "ok"}
        assert observers["metrics"].registry.get_sample_value("multiworld_requests_total", labels) == 1
    else:
        assert observers["statistics"].as_json("resnet18", "v")["inference_stats"]["fail"]["count"] == 1
