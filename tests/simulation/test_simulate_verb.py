"""`multiworld simulate`: its output, and its errors for invalid input."""

from __future__ import annotations

import importlib.util
import json

import pytest
import typer

from multiworld_serving.cli.main import main
from multiworld_serving.cli.options import seconds

QUICK = ["simulate", "--requests", "400", "--mtbf", "1h", "--service-time", "200ms"]


def test_table_has_a_line_per_number_of_replicas_and_load(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--replicas", "1,2", "--load", "0.3,0.6"]) == 0
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if "%" in line and " ms " in line]
    assert lines == [["1", "0.3"], ["1", "0.6"], ["2", "0.3"], ["2", "0.6"]]


def test_json_contains_the_plan_and_the_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--replicas", "1", "--load", "0.5", "--recovery", "20s", "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert line["plan"]["recovery_s"] == 20.0
    assert line["plan"]["mtbf_s"] == 3600.0
    assert 0 < line["failed"] < 1
    assert sum(line["refused"].values()) == pytest.approx(line["failed"])
    assert line["p50_s"] < line["p99_s"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--replicas", "1,x"], "1,2,3"),
        (["--load", "much"], "commas"),
        (["--mtbf", "3parsecs"], "duration"),
        (["--stages", "0"], "at least 1"),
        (["--service-tail", "long"], "none or usual or heavy"),
        (["--plot", "plan.gif"], ".png"),
        (["--plot", "nowhere/plan.png"], "does not exist"),
    ],
)
def test_bad_input_prints_one_line_and_exits_with_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    assert main([*QUICK, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert expected in printed.err
    assert printed.err.count("\n") == 1


def test_plot_names_the_missing_package_when_matplotlib_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert main([*QUICK, "--plot", "plan.png"]) == 2
    assert "pip install 'multiworld-serving[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("25ms", 0.025),
        ("9s", 9.0),
        ("2", 2.0),
        ("1.5h", 5400.0),
        ("30 min", 1800.0),
        ("1d", 86_400.0),
        ("5us", 5e-6),
        ("1.5m", 90.0),
    ],
)
def test_duration_is_parsed_with_its_unit(text: str, expected: float) -> None:
    assert seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "ms", "-1s", "1e3", "1 year", "never", "nan"])
def test_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        seconds(text)


def test_progress_is_shown_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert main([*QUICK, "--replicas", "1", "--load", "0.3"]) == 0
    assert "1/1" in capsys.readouterr().err
