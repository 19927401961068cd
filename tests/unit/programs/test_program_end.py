"""How the command `multiworld` ends its process."""

import os
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


INHERITED = """
import os, sys
os.closerange(0, 3)
os.execv(sys.executable, [sys.executable, "-m", "multiworld_serving.cli.main", "--version"])
"""


def test_program_succeeds_when_its_standard_streams_are_closed() -> None:
    assert subprocess.run([sys.executable, "-c", INHERITED], check=False).returncode == 0


def test_process_waits_for_children_when_its_parent_ignored_their_end() -> None:
    program = (
        "import os, signal, subprocess; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.close(0); "
        "from multiworld_serving.common.config.process import prepare_inherited; prepare_inherited(); "
        "assert os.path.samefile('/dev/fd/0', os.devnull); assert subprocess.call(['false']) == 1"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_program_fails_when_its_output_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 1
    assert ended.stderr == "multiworld: error: cannot write standard output: No space left on device\n"


def test_program_fails_without_a_traceback_when_the_reader_of_its_output_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, "--version"], stdout=pipe, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 1
    assert ended.stderr == "multiworld: error: cannot write standard output: Broken pipe\n"
