"""Failing observers do not affect the observed code."""

import logging

import pytest

from multiworld_serving.common.observers import suppress_errors


class Observer:
    def __init__(self) -> None:
        self.calls = 0

    @suppress_errors
    def saw(self, what: str, *, fails: bool = False) -> str | None:
        self.calls += 1
        if fails:
            raise BrokenPipeError(what)
        return what

    @suppress_errors
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
