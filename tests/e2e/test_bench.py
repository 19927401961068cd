"""`multiworld bench` against a real service: closed and open loop, images and tensors, and who is told what when it fails."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.images import photo
from cli.main import main
from deploy.service import LocalService

pytestmark = pytest.mark.timeout(300)

SHORT = ["--duration", "1s", "--warm-up", "200ms"]


def bench(service: LocalService, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["bench", "--url", service.url, "--json", *SHORT, *arguments]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_closed_loop_of_images(service: LocalService, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(photo())
    picture = tmp_path / "bench.png"
    found = bench(service, capsys, "--clients", "2", "--image", str(tmp_path / "photo.jpg"), "--plot", str(picture))
    assert (found["load"], found["failed"], found["unsent"]) == ("2 clients", 0, 0)
    assert isinstance(found["answered"], int)
    assert found["answered"] > 0
    assert {"p50", "p99", "max", "mean"} <= dict(found["latency_ms"]).keys()  # type: ignore[call-overload]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_open_loop_of_tensors(service: LocalService, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(service, capsys, "--rate", "20", "--tensors", "--images-per-request", "4")
    assert (found["load"], found["failed"], found["images_per_request"]) == ("20 requests/s", 0, 4)
    assert found["images_per_s"] == pytest.approx(4 * float(str(found["answered_per_s"])))


def test_people_get_a_table_and_a_live_display_on_a_terminal_alone(service: LocalService) -> None:
    command = [sys.executable, "-m", "cli.main", "bench", "--url", service.url, *SHORT, "--clients", "1"]
    piped = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "answers/s" in piped.stdout
    assert "0 failed" in piped.stdout
    assert "\x1b" not in piped.stdout + piped.stderr
    ours, theirs = pty.openpty()
    on_terminal = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    shown = b""
    while chunk := _read(ours):
        shown += chunk
    os.close(ours)
    assert on_terminal.wait(120) == 0
    assert on_terminal.stdout is not None
    on_terminal.stdout.close()
    assert b"answers/s" in shown
    assert b"\x1b" in shown


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other end of a terminal is closed
        return b""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--images-per-request", "2"], "needs --tensors"),
        (["--tensors", "--image", "a.jpg"], "cannot go together"),
        (["--image", "/nowhere.jpg"], "/nowhere.jpg"),
        (["--duration", "soon"], "--duration"),
        (["--plot", "picture.txt"], "picture.txt"),
        (["--tensors", "--images-per-request", "100000"], "at the most"),
    ],
)
def test_bad_usage_is_one_line(
    service: LocalService, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["bench", "--url", service.url, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error


def test_failures_are_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:1"]) == 1
    assert "multiworld serve" in capsys.readouterr().err
