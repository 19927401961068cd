"""`multiworld chaos` on a running service and on one of its own: its verdict, JSON and exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from multiworld_serving.cli.main import main
from multiworld_serving.testing.local_service import LocalService

pytestmark = pytest.mark.timeout(600)


def chaos(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "multiworld_serving.cli.main", "chaos", *map(str, arguments)]
    # As in a pipe: with COLUMNS, which readline exports, it would be as narrow as a terminal.
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return subprocess.run(command, capture_output=True, text=True, timeout=540, check=False, env=environment)


def test_chaos_exits_with_0_when_no_request_is_lost(service: LocalService, tmp_path: Path) -> None:
    file = tmp_path / "chaos.json"
    done = chaos("--url", service.url, "--faults", "kill,leader-kill", "--rounds", 2, "--clients", 4, "--json", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok: no request lost" in done.stdout
    found = json.loads(file.read_text())
    assert (found["verdict"], found["failed"], found["duplicates"], found["skipped"]) == ("ok", 0, 0, {})
    assert found["requests"] > 0
    assert {row["fault"]: row["times"] for row in found["faults"]} == {"kill": 2, "leader-kill": 2}
    for injection in found["injections"]:
        assert 0 < injection["detected_s"] <= injection["recovered_s"]


def test_chaos_exits_with_1_when_requests_were_lost(tmp_path: Path) -> None:
    """Without recovery grace and another leader, killing a whole stage makes the service refuse requests."""
    file = tmp_path / "chaos.json"
    settings = ("--set", "image_size=32", "--set", "recovery_grace_s=0")
    done = chaos("--faults", "stage", "--leaders", 1, "--clients", 4, "--json", file, *settings)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["failed"] > 0
    assert {failure["status"] for failure in found["failures"]} == {503}
    assert "failed and are not excused" in found["verdict"][0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--faults", "explode"), "there is no such fault"),
        (("--duration", "soon"), "--duration soon: must be a number with a unit of"),
        (("--set", "nonsense"), "--set nonsense: must be NAME=VALUE"),
        (("--url", "http://127.0.0.1:1", "--set", "stages=3"), "--set applies to a service that this command starts"),
        (("--url", "http://127.0.0.1:1", "--compose", "shop"), "mutually exclusive"),
    ],
)
def test_wrong_usage_prints_one_line(arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error


def test_unreachable_service_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--url", "http://127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("multiworld: error: ")
    assert error.count("\n") == 1
