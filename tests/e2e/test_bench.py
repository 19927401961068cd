"""`multiworld bench` against a running service: closed and open loop, images and tensors, errors."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from multiworld_serving.cli.main import main
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService

pytestmark = pytest.mark.timeout(300)

SHORT = ["--duration", "1s", "--warm-up", "200ms"]


def bench(service: LocalService, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["bench", "--url", service.url, "--json", *SHORT, *arguments]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_closed_loop_with_images_reports_latency(
    service: LocalService, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "photo.jpg").write_bytes(photo())
    plot = tmp_path / "bench.png"
    found = bench(service, capsys, "--clients", "2", "--image", str(tmp_path / "photo.jpg"), "--plot", str(plot))
    assert (found["load"], found["failed"], found["unsent"]) == ("2 clients", 0, 0)
    assert isinstance(found["answered"], int)
    assert found["answered"] > 0
    assert {"p50", "p99", "max", "mean"} <= dict(found["latency_ms"]).keys()  # type: ignore[call-overload]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_open_loop_with_tensors_reports_throughput(service: LocalService, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(service, capsys, "--rate", "20", "--tensors", "--images-per-request", "4")
    assert (found["load"], found["failed"], found["images_per_request"]) == ("20 requests/s", 0, 4)
    assert found["images_per_s"] == pytest.approx(4 * float(str(found["answered_per_s"])))


def test_live_display_is_shown_only_on_a_terminal(service: LocalService) -> None:
    command = [
        sys.executable,
        "-m",
        "multiworld_serving.cli.main",
        "bench",
        "--url",
        service.url,
        *SHORT,
        "--clients",
        "1",
    ]
    piped = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "answers/s" in piped.stdout
    assert "0 failed" in piped.stdout
    assert "\x1b" not in piped.stdout + piped.stderr
    primary, secondary = pty.openpty()
    on_terminal = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=secondary, env={**os.environ, "TERM": "xterm"}
    )
    os.close(secondary)
    shown = b""
    while chunk := _read(primary):
        shown += chunk
    os.close(primary)
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
    ("arguments", "message"),
    [
        (["--images-per-request", "2"], "needs --tensors"),
        (["--tensors", "--image", "a.jpg"], "exclude each other"),
        (["--image", "/nowhere.jpg"], "/nowhere.jpg"),
        (["--duration", "soon"], "--duration"),
        (["--plot", "picture.txt"], "picture.txt"),
        (["--tensors", "--images-per-request", "100000"], "at the most"),
    ],
)
def test_wrong_usage_prints_one_line(
    service: LocalService, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", "--url", service.url, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_bench_exits_with_1_when_the_service_is_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:1"]) == 1
    assert "multiworld serve" in capsys.readouterr().err
