"""`multiworld chaos` with a service of its own: a kill and a freeze, its table, JSON and exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from multiworld_serving.testing.local_service import LocalService

pytestmark = pytest.mark.timeout(600)


def chaos(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "multiworld_serving.cli.main", "chaos", *map(str, arguments)]
    # As in a pipe: with COLUMNS, which readline exports, it would be as narrow as a terminal.
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return subprocess.run(command, capture_output=True, text=True, timeout=540, check=False, env=environment)


def test_chaos_exits_with_0_when_no_request_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "chaos.json"
    faults = ("kill", "freeze", "leader-kill", "leader-freeze", "frontend-kill")
    options = ("--rounds", 2, "--set", "image_size=32", "--clients", 4, "--json", file)
    done = chaos("--faults", ",".join(faults), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok: no request lost" in done.stdout
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.strip()}
    found = json.loads(file.read_text())
    assert (found["verdict"], found["failed"], found["duplicates"], found["skipped"]) == ("ok", 0, 0, {})
    assert found["requests"] > 0
    assert {row["fault"]: (row["times"], row["failed"]) for row in found["faults"]} == dict.fromkeys(faults, (2, 0))
    assert {failure["status"] for failure in found["failures"]} <= {0}, "connections to a killed frontend"
    of_workers = [injection for injection in found["injections"] if injection["fault"] in ("kill", "freeze")]
    causes = {(injection["fault"], *injection["causes"]) for injection in of_workers}
    assert causes == {("kill", "exit"), ("freeze", "hang")}, "a fault had no effect"
    of_leaders = [injection for injection in found["injections"] if injection["fault"].startswith("leader")]
    assert {injection["targets"][0] for injection in of_leaders} == {"leader-0", "leader-1"}
    for injection in (*of_workers, *of_leaders):
        assert 0 < injection["detected_s"] <= injection["recovered_s"]
    for fault in ("kill", "freeze"):
        assert rows[fault][1:5] == ["2", "0", "0", "0"]
    assert any(name.startswith("supervisor") for name in found["resources"])


def test_chaos_exits_with_1_when_requests_were_lost(tmp_path: Path) -> None:
    """Without recovery grace and another leader, killing a whole stage makes the service refuse requests."""
    file = tmp_path / "chaos.json"
    settings = ("--set", "image_size=32", "--set", "recovery_grace_s=0")
    done = chaos("--faults", "stage", "--leaders", 1, "--clients", 4, "--json", file, *settings)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["failed"] > 0
    assert {failure["status"] for failure in found["failures"]} == {503}
    assert found["faults"][0]["failed"] == found["failed"]
    assert "failed and are not excused" in found["verdict"][0]


def test_chaos_finds_the_processes_of_a_running_service(service: LocalService) -> None:
    done = chaos("--url", service.url, "--faults", "kill,frontend-kill")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out" not in done.stdout
    assert all(replica["state"] == "ready" for stage in service.status()["stages"] for replica in stage["replicas"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--faults", "explode"), "there is no such fault"),
        (("--duration", "soon"), "'soon' is not a duration"),
        (("--set", "nonsense"), "--set nonsense: must be NAME=VALUE"),
        (("--url", "http://127.0.0.1:1", "--set", "stages=3"), "--set cannot be used with"),
        (("--url", "http://127.0.0.1:1", "--compose", "shop"), "exclude each other"),
    ],
)
def test_wrong_usage_prints_one_line(arguments: tuple[str, ...], says: str) -> None:
    done = chaos(*arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_unreachable_service_is_reported() -> None:
    done = chaos("--url", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("multiworld: error: ")
    assert done.stderr.count("\n") == 1
