"""`python -m multiworld_serving.testing.simulation` prints failures with the command that reproduces them."""

from __future__ import annotations

import shlex
from functools import partial

import pytest

import multiworld_serving.testing.simulation.__main__ as program
from multiworld_serving.testing.simulation import soak
from multiworld_serving.testing.simulation.case import Case
from tests.simulation.planted import LosesBatches

_SOAK = ["soak", "--hours", "0.0003", "--events", "2000", "--processes", "1", "--first-seed", "5"]


def test_soak_prints_nothing_without_failures(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(_SOAK) == 0
    assert "starting at seed 5" in capsys.readouterr().out


def test_soak_prints_the_replay_command_and_the_shrunk_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (soak, program):
        monkeypatch.setattr(module, "Case", partial(Case, scheduler=LosesBatches))
    assert program.main([*_SOAK, "--scenario", "kills-in-turn"]) == 1
    printed = capsys.readouterr().out
    commands = [
        line.partition(": ")[2]
        for line in printed.splitlines()
        if ": python -m multiworld_serving.testing.simulation" in line
    ]
    replay, shrink = (shlex.split(command)[3:] for command in commands)

    assert program.main([*replay, "--trace"]) == 1
    replayed = capsys.readouterr().out
    assert replayed.splitlines()[0] in printed
    assert "ReplicaLost" in replayed

    assert program.main(shrink) == 1
    assert "fault kill at" in capsys.readouterr().out


def test_soak_uses_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([*_SOAK[:-4], "--processes", "2", "--scenario", "calm"]) == 0
    assert "0 failed" in capsys.readouterr().out


def test_replay_reports_that_nothing_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["replay", "--scenario", "calm", "--seed", "1", "--events", "500"]) == 0
    assert "no failure" in capsys.readouterr().out
    assert program.main(["shrink", "--scenario", "calm", "--seed", "1", "--events", "500"]) == 0
    assert "nothing to shrink" in capsys.readouterr().out
