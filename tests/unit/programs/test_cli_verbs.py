"""The command line: arguments, output and exit status of each verb."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import Mock
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest

from multiworld_client import Client
from multiworld_serving.cli.main import main
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.settings import Settings, extra, public_fields
from multiworld_serving.common.service.snapshots import (
    FailureSnapshot,
    FrontendSnapshot,
    LeaderSnapshot,
    PipelineSnapshot,
    ReplicaSnapshot,
    StageSnapshot,
)
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.common.settings.serve import FrontendSettings, ServeSettings
from multiworld_serving.common.settings.worker import WorkerSettings
from multiworld_serving.models.errors import ModelError
from multiworld_serving.testing.options import seconds
from tests.http_server import QuietHandler, serving

ANSWER = {
    "model": "resnet18",
    "version": "random:0",
    "predictions": [{"label": "tabby cat", "class_id": 281, "probability": 0.75}],
    "timings_ms": {"total": 12.5, "queue": 1.0},
}
REPLICA = ReplicaSnapshot(
    *(0, "ready", "s0r0", 3, "local-0"),
    device="cpu",
    in_flight=1,
    batches_done=42,
    last_failure=FailureSnapshot("exit", "closed by peer", 0.0),
)
SNAPSHOT = PipelineSnapshot(
    *("resnet18", "random:0", True, False, 200.0, 5, 7),
    stages=(StageSnapshot(0, ("stem",), (REPLICA, ReplicaSnapshot(1, "absent"))),),
    spares=(ReplicaSnapshot(0, "ready", worker="local-4"),),
    leaders=(LeaderSnapshot("127.0.0.1:8001", "ready", "leader-0"), LeaderSnapshot("127.0.0.1:8101", "unreachable")),
    frontends=(FrontendSnapshot("frontend-0", "here", 7),),
)


class FakeService(QuietHandler):
    """Answers like the service; refuses files that are not named cat."""

    status: ClassVar[Any] = SNAPSHOT

    def do_GET(self) -> None:
        self._answer(200, self.status)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if b"cat" not in body:
            self._answer(415, {"error": "not an image"})
            return
        top_k = int(parse_qs(urlsplit(self.path).query).get("top_k", ["5"])[0])
        self._answer(200, {**ANSWER, "asked_for": top_k})

    def _answer(self, status: int, content: object) -> None:
        self.answer(status, msgspec.json.encode(content))


@pytest.fixture
def url() -> Iterator[str]:
    with serving(FakeService) as running:
        yield running


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cat.jpg").write_bytes(b"a cat")
    Path("dog.txt").write_bytes(b"a dog")


def test_loopback_address_is_reached_without_a_proxy(
    url: str, images: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for address in (url, url.replace("127.0.0.1", "localhost")):
        assert main(["predict", "cat.jpg", "--url", address]) == 0
        assert main(["status", "--url", address]) == 0
        with Client(address) as client:
            assert client._http.get(f"{address}/status").status_code == 200
    assert "tabby cat" in capsys.readouterr().out


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands for the `run` functions of all programs."""
    run = Mock(return_value=0)
    for name in ("server.leader.main", "server.frontend.main", "workers.main", "server.supervisor.service"):
        module = ModuleType(f"multiworld_serving.{name}")
        vars(module)["run"] = run
        monkeypatch.setitem(sys.modules, f"multiworld_serving.{name}", module)
    monkeypatch.setattr("multiworld_serving.cli.options.configure_logging", lambda *_, **__: None)
    monkeypatch.setattr("multiworld_serving.cli.options.exit_with_parent", lambda: None)
    monkeypatch.delenv("MULTIWORLD_TOKEN", raising=False)
    return run


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("multiworld: error: ")
    assert err.count("\n") == 1
    return err


def test_serve_passes_its_settings_and_the_supervisor(program: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    program.return_value = 7
    monkeypatch.setenv("MULTIWORLD_ACCESS_LOG", "true")
    assert main(["serve", "--model", "resnet18", "--stages", "3", "--http-port", "0", "--no-access-log"]) == 7
    settings, _ = program.call_args.args
    assert (settings.model, settings.stages, settings.http_port, settings.access_log) == ("resnet18", 3, 0, False)
    assert settings.token is None, "only its own processes need a secret"


def test_frontend_joins_every_leader_that_it_is_given(program: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIWORLD_TOKEN", "open-sesame")
    assert main(["frontend", "--leader", "10.0.0.1:8001", "--leader", "10.0.0.2:8001,10.0.0.3:8001"]) == 0
    [settings] = program.call_args.args
    assert isinstance(settings, FrontendSettings)
    assert [str(address) for address in settings.leaders] == ["10.0.0.1:8001", "10.0.0.2:8001", "10.0.0.3:8001"]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("sevre", "unknown verb sevre: did you mean serve? (see multiworld --help)"),
        ("serve --stagse 2", "unknown argument --stagse: did you mean --stages? (see multiworld serve --help)"),
        ("serve --stages 0", "--stages 0: must be a whole number from 1 to 64"),
        ("serve --stages", "--stages: expected one argument"),
        ("serve extra", "unknown argument extra"),
        ("worker", "--leader is missing"),
        ("predict", "required: FILE…"),
        ("predict --url nowhere cat.jpg", "--url nowhere: expected a URL"),
        ("status --timeout-s 0", "--timeout-s 0: must be a number above 0"),
        ("models list --json a b", "models list a b: share takes NAME VERSION=PERCENT"),
        ("models share a", "models share a: share takes NAME VERSION=PERCENT"),
        ("models share a 2", "models share a 2: share takes NAME VERSION=PERCENT"),
        ("models add a=resnet18 --share 101", "--share"),
        ("bench --duration 1_year", "--duration 1_year: must be a number with a unit"),
    ],
)
def test_bad_input_prints_one_line_and_exits_with_2(
    program: Mock, capsys: pytest.CaptureFixture[str], command: str, says: str
) -> None:
    assert main(command.split()) == 2
    assert says in one_line(capsys)


@pytest.mark.parametrize("kind", [UserError, ModelError])
def test_error_of_the_user_prints_one_line_and_exits_with_2(
    program: Mock, capsys: pytest.CaptureFixture[str], kind: type[Exception]
) -> None:
    program.side_effect = kind("port 8000 is in use:\n  choose another with --http-port")
    assert main(["serve"]) == 2
    assert one_line(capsys).endswith("port 8000 is in use: choose another with --http-port\n")


def test_ctrl_c_exits_with_130(program: Mock) -> None:
    program.side_effect = KeyboardInterrupt
    assert main(["serve"]) == 130


@pytest.mark.parametrize(
    ("verb", "cls"),
    [("serve", ServeSettings), ("leader", LeaderSettings), ("frontend", FrontendSettings), ("worker", WorkerSettings)],
)
def test_help_all_lists_every_setting_except_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str, cls: type[Settings]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main([verb, "--help"]) == 0
    short = capsys.readouterr().out
    assert main([verb, "--help-all"]) == 0
    text = capsys.readouterr().out
    secrets = {"token"}
    aliases = {each[2:].replace("-", "_") for field in public_fields(cls).values() for each in extra(field)["names"]}
    for name in cls.model_fields:
        assert bool(re.search(rf"--{name.replace('_', '-')}[ ,]", text)) == (
            name in (public_fields(cls).keys() | aliases) - secrets
        ), name
    assert "--join-timeout-s" not in short
    assert "--settings-json" not in text


def test_predict_prints_one_json_object_per_file(url: str, images: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "cat.jpg", f"--url={url}", "--json", "cat.jpg", "--top-k", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == [{"file": "cat.jpg", **ANSWER, "asked_for": 1}] * 2


def test_predict_prints_the_labels_and_continues_when_a_file_is_refused_or_missing(
    url: str, images: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "--url", url, "dog.txt", "nowhere.jpg", "cat.jpg"]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines() == ["cat.jpg: resnet18 random:0, 12.5 ms", "  0.7500  tabby cat (class 281)"]
    assert err.splitlines() == [
        "multiworld: error: dog.txt: not an image (HTTP 415)",
        "multiworld: error: nowhere.jpg: No such file or directory",
    ]


@pytest.mark.parametrize("arguments", [["status"], ["predict", "cat.jpg", "cat.jpg"]], ids=["status", "predict"])
def test_error_says_what_to_do_when_nothing_answers(
    images: None, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with serving(FakeService) as url:
        pass
    assert main([*arguments, "--url", url]) == 1
    line = one_line(capsys)
    assert "Connection refused" in line
    assert "multiworld serve" in line


def test_https_url_of_a_service_without_a_certificate_is_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", url.replace("http", "https")]) == 1
    line = one_line(capsys)
    assert "give a URL with http://" in line
    assert "nothing answers" not in line


def test_status_prints_a_table(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", url]) == 0
    out = capsys.readouterr().out
    reasons = "stage 0 has 1 of 2 replicas; leader 127.0.0.1:8101 is unreachable"
    assert f"resnet18 random:0: degraded ({reasons}), leader up 3 min 20 s, 5 waiting, 7 requests in flight" in out
    for part in ("s0.r0@3", "absent", "exit, ", "spares: local-4 (ready)", "127.0.0.1:8101 (unreachable)"):
        assert part in out


def test_table_of_status_fits_into_80_columns_and_says_how_many_workers_can_be_lost(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = FailureSnapshot("exit", "", time.time() - 3599)
    replicas = tuple(
        replace(REPLICA, slot=slot, world=f"spare{slot}", pid=4194304 - slot, last_failure=broken) for slot in range(3)
    )
    monkeypatch.setattr(FakeService, "status", replace(SNAPSHOT, stages=(StageSnapshot(1, (), replicas),)))
    assert main(["status", "--url", url]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines() if line.startswith(("replica", "s1.")))
    assert re.search(r"^s1\.r2@3 +ready +local-0 +4194302 +cpu +1 +42 +exit, 59 min ago$", out, re.MULTILINE)
    assert "failures tolerated per stage: 2" in out


def test_watch_in_a_pipe_prints_the_state_every_second(url: str) -> None:
    command = [sys.executable, "-m", "multiworld_serving.cli.main", "status", "--watch", "--url", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        headlines = (line for line in watching.stdout if line.startswith("resnet18 random:0: degraded"))
        assert next(headlines)
        assert next(headlines)
        watching.terminate()


class BusyService(FakeService):
    """Cannot serve now."""

    def _answer(self, status: int, content: object) -> None:
        super()._answer(503, {"error": "not ready"})


@pytest.mark.parametrize("arguments", [["status", "--json"], ["predict", "cat.jpg", "cat.jpg"]], ids=" ".join)
def test_next_url_is_used_when_one_fails(
    images: None, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with serving(FakeService) as ended:
        pass
    with serving(BusyService) as busy:
        for failing in (ended, busy):
            assert main([*arguments, "--url", failing, "--url", url]) == 0
            assert main([*arguments, "--url", f"{failing},{url}"]) == 0
            monkeypatch.setenv("MULTIWORLD_URL", f"{failing},{url}")
            assert main(arguments) == 0
        assert capsys.readouterr().err == ""
        assert main([*arguments[:2], "--url", ended, "--url", busy]) == 1
        assert "not ready" in one_line(capsys)


def test_status_reports_that_another_server_answers(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeService, "status", ["something", "else"])
    assert main(["status", "--url", url]) == 1
    assert "does not answer like a multiworld service" in one_line(capsys)


def test_duration_is_parsed_with_its_unit() -> None:
    durations = {"25ms": 0.025, "9s": 9.0, "2": 2.0, "1.5h": 5400.0, "30 min": 1800.0, "1d": 86_400.0, "5us": 5e-6}
    assert {text: seconds(text) for text in durations} == pytest.approx(durations)
