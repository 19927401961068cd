"""`multiworld chaos` on a running service and on one of its own: its verdict, JSON and exit status."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiworld_serving.cli.main import main
from multiworld_serving.testing.local_service import LocalService
from tests.refusals import refusal


@pytest.fixture(autouse=True)
def _signals_restored() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def test_chaos_exits_with_0_when_no_request_is_lost(
    service: LocalService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chaos.json"
    options = ["--faults", "kill,leader-kill", "--clients", "4", "--json", str(file)]
    assert main(["chaos", "--url", service.url, *options]) == 0, capsys.readouterr()
    assert "ok: no request lost" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert (found["verdict"], found["failed"], found["duplicates"], found["skipped"]) == ("ok", 0, 0, {})
    assert found["requests"] > 0
    assert {row["fault"]: row["times"] for row in found["faults"]} == {"kill": 1, "leader-kill": 1}
    for injection in found["injections"]:
        assert 0 < injection["detected_s"] <= injection["recovered_s"]


def test_chaos_exits_with_1_when_requests_were_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without recovery grace and another leader, killing a whole stage makes the service refuse requests."""
    file = tmp_path / "chaos.json"
    # The command excuses requests that were refused after its own grace.
    settings = ["--set", "image_size=32", "--set", "recovery_grace_s=0", "--recovery-grace-s", "600"]
    settings += ["--heartbeat-timeout-s", "10"]
    options = ["--faults", "stage", "--leaders", "1", "--clients", "4", "--json", str(file)]
    assert main(["chaos", *options, *settings]) == 1, capsys.readouterr()
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
    ],
)
def test_wrong_usage_prints_one_line(arguments: tuple[str, ...], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    (error,) = refusal(capfd, "chaos", *arguments)
    assert says in error


def test_unreachable_service_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--url", "http://127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("multiworld: error: ")
    assert error.count("\n") == 1
