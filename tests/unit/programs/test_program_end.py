"""How the command `multiworld` ends its process."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys
from multiworld_serving.cli.main import run
atexit.register(print, "the interpreter was finalized")
run(sys.argv[1:])
"""


@pytest.mark.parametrize(("arguments", "status"), [(("--version",), 0), (("serve", "--model", "no.bundle"), 2)])
def test_program_ends_with_its_output_and_status_but_without_finalizing_the_interpreter(
    arguments: tuple[str, ...], status: int
) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == status
    assert "finalized" not in ended.stdout + ended.stderr
    assert (ended.stderr if status else ended.stdout).strip()


def test_program_fails_when_its_output_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 1
    assert ended.stderr == "multiworld: error: cannot write standard output: No space left on device\n"
