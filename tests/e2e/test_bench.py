"""`multiworld bench` against a running service: open loop, tensors, errors."""

import json

import pytest

from multiworld_serving.cli.main import main
from multiworld_serving.testing.local_service import LocalService

pytestmark = pytest.mark.timeout(300)

SHORT = ["--duration", "1s", "--warm-up", "200ms"]


def bench(service: LocalService, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["bench", "--url", service.url, "--json", *SHORT, *arguments]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_open_loop_with_tensors_reports_throughput_and_latency(
    service: LocalService, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench(service, capsys, "--rate", "20", "--rows", "4")
    assert (found["load"], found["failed"], found["rows_per_request"]) == ("20 requests/s", 0, 4)
    assert {"p50", "p99", "max", "mean"} <= dict(found["latency_ms"]).keys()  # type: ignore[call-overload]
    assert found["rows_per_s"] == pytest.approx(4 * float(str(found["answered_per_s"])))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "2", "--file", "a.jpg"], "mutually exclusive"),
        (["--file", "/nowhere.jpg"], "/nowhere.jpg"),
        (["--duration", "soon"], "--duration"),
        (["--rows", "100000"], "at most"),
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
