"""`python -m multiworld_serving.testing.simulation` prints failures with the command that reproduces them."""

from __future__ import annotations

import shlex
from functools import partial

import pytest

import multiworld_serving.testing.simulation.__main__ as program
from multiworld_serving.testing.simulation.case import Case
from tests.simulation.planted import LosesBatches


def test_soak_prints_the_replay_command_and_the_shrunk_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    soak = ["soak", "--hours", "0.0003", "--events", "2000", "--first-seed", "5", "--scenario", "kills-in-turn"]
    assert program.main(soak) == 0
    assert "no failure" in capsys.readouterr().out
    monkeypatch.setattr(program, "Case", partial(Case, scheduler=LosesBatches))
    assert program.main(soak) == 1
    printed = capsys.readouterr().out
    commands = [line.partition(": ")[2] for line in printed.splitlines() if ": python -m multiworld_serving" in line]
    replay, shrink = (shlex.split(command)[3:] for command in commands)
    assert program.main([*replay, "--trace"]) == 1
    replayed = capsys.readouterr().out
    assert replayed.splitlines()[0] in printed
    assert "ReplicaLost" in replayed
    assert program.main(shrink) == 1
    assert "fault kill at" in capsys.readouterr().out
