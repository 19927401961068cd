"""Completion knows the verbs; colors are used on terminals only."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("words", "offered"), [("multiworld st", "status"), ("multiworld status --wa", "--watch")])
def test_shell_completes_verbs_and_options(words: str, offered: str) -> None:
    asked = {"_MULTIWORLD_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    command = [sys.executable, "-m", "multiworld_serving.cli.main"]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, check=True)
    assert offered in done.stdout.split()


def test_output_in_a_pipe_has_no_colors() -> None:
    command = [sys.executable, "-m", "multiworld_serving.cli.main"]
    for arguments in (["--help"], ["bench", "--help"], ["chaos", "--list"]):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
        assert "\x1b" not in done.stdout, arguments
