"""`rolling-restart`, `load-version` and `unload`: which port they use, what they send and what they show."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any, ClassVar

import httpx
import pytest

from multiworld_serving.cli.main import main
from tests.http_server import QuietHandler, serving

RESTARTING = {"worker": "w0", "slot": "s0.r0", "state": "restarting", "number": 1, "total": 2}
RESTARTED = {**RESTARTING, "state": "restarted", "left_s": 0.5, "back_s": 2.5}


class Port(QuietHandler):
    """One port of a service. Requests for the other one get 404 with its number."""

    other_port: ClassVar[int] = 0
    serves: ClassVar[tuple[str, ...]] = ()
    steps: ClassVar[list[dict[str, Any]]] = []
    hangs: ClassVar[bool] = False
    serves_version: ClassVar[str] = "1"
    credentials: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self.credentials.append(self.headers["Authorization"])
        self.rfile.read(int(self.headers["Content-Length"]))
        self._serve()

    def _serve(self) -> None:
        if not self.path.startswith(self.serves):
            self._answer(404, {"error": "elsewhere", "other_port": self.other_port})
        elif self.path == "/v2/repository/index":
            self._answer(200, [{"name": "resnet18", "version": self.serves_version, "state": "READY"}])
        elif self.path.endswith("/load"):
            if self.hangs:
                self.rfile.read(1)  # until the client closes the connection
            else:
                self._answer(200, {"name": "resnet18", "version": "2", "weights": "random:1"})
        else:
            self._answer(200, *self.steps)

    def _answer(self, status: int, *lines: object) -> None:
        self.answer(status, "\n".join(map(json.dumps, lines)).encode())


@contextlib.contextmanager
def service(*steps: dict[str, Any], hangs: bool = False) -> Iterator[tuple[str, str]]:
    """The URLs of the HTTP API and of the admin port of a service."""
    Port.credentials.clear()
    http: Any = type("Http", (Port,), {"serves": ("/predict",)})
    own = {"serves": ("/admin", "/v2/repository"), "steps": list(steps), "hangs": hangs}
    operations: Any = type("Admin", (Port,), own)
    with serving(http) as http_url, serving(operations) as admin_url:
        http.other_port, operations.other_port = (int(url.rpartition(":")[2]) for url in (admin_url, http_url))
        yield http_url, admin_url


@pytest.mark.parametrize("port", [0, 1], ids=["http", "admin"])
def test_restart_finds_the_admin_port_from_either_url(capsys: pytest.CaptureFixture[str], port: int) -> None:
    with service(RESTARTING, RESTARTED, {"state": "done", "restarted": 1}) as urls:
        assert main(["rolling-restart", "--url", urls[port] + ",http://127.0.0.1:1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1/2 w0 (s0.r0): restarting",
        "w0: stopped after 0.5 s, serving after 2.5 s",
        "1 workers restarted",
    ]


def test_restart_that_fails_exits_with_1_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with service(RESTARTING, {"state": "failed", "restarted": 0, "error": "w0 did not rejoin"}) as (_, admin_url):
        assert main(["rolling-restart", "--url", admin_url]) == 1
    assert capsys.readouterr().err == "multiworld: error: w0 did not rejoin\n"


def test_restart_that_takes_too_long_names_the_worker(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(response: httpx.Response) -> Iterator[str]:
        yield json.dumps(RESTARTING)
        raise httpx.ReadTimeout("no further step")

    monkeypatch.setattr(httpx.Response, "iter_lines", lines)
    with service(RESTARTING) as (_, admin_url):
        assert main(["rolling-restart", "--url", admin_url]) == 1
    assert "w0 (s0.r0) was told to restart and does not serve after 3600 s; check" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("served", "says"), [("1", []), ("2", ["nothing has changed: the service already had these weights"])]
)
def test_load_prints_the_version_and_whether_it_was_served_before(
    served: str, says: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Port, "serves_version", served)
    with service() as (_, admin_url):
        assert main(["load-version", "random:1", "--url", admin_url]) == 0
    assert capsys.readouterr().out.splitlines() == ["resnet18 answers with random:1, version 2", *says]


def test_load_that_takes_too_long_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with service(hangs=True) as (_, admin_url):
        assert main(["load-version", "--url", admin_url, "--timeout-s", "1"]) == 1
    assert "did not answer within 1 s; increase --timeout-s" in capsys.readouterr().err


def test_only_an_admin_key_is_sent_and_never_the_join_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIWORLD_TOKEN", "the-join-token")
    with service({"state": "done", "restarted": 0}) as (_, admin_url):
        assert main(["rolling-restart", "--url", admin_url]) == 0
        monkeypatch.setenv("MULTIWORLD_API_KEY", "the-admin-key")
        assert main(["rolling-restart", "--url", admin_url]) == 0
    assert Port.credentials == [None, "Bearer the-admin-key"]
