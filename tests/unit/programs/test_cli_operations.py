"""`rolling-restart` and `load-version`: which port they use, what they show, and how Ctrl-C ends them."""

import contextlib
import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import httpx
import pytest

from multiworld_serving.cli.main import main
from multiworld_serving.cli.service import ServiceError, http_errors
from multiworld_serving.cli.verbs import admin
from tests.http_server import QuietHandler, serving

STATUS = {
    "model": "resnet18",
    "version": "random:0",
    "version_loading": "random:1",
    "rollout": {
        "phase": "loading",
        "leader": "leader-0",
        "worker": "w1",
        "world": "s0.r1",
        "passed": ["w0"],
        "workers": 3,
    },
}
RESTARTING = {"worker": "w0", "slot": "s0.r0", "state": "restarting", "number": 1, "total": 2}
RESTARTED = {**RESTARTING, "state": "restarted", "left_s": 0.5, "back_s": 2.5}


class Port(QuietHandler):
    """One port of a service. Requests for the other one get 404 with its number."""

    other_port: ClassVar[int] = 0
    serves: ClassVar[tuple[str, ...]] = ()
    steps: ClassVar[list[dict[str, Any]]] = []
    status_asked: ClassVar[threading.Semaphore]
    interrupts: ClassVar[bool] = False
    hangs: ClassVar[bool] = False

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._serve()

    def _serve(self) -> None:
        if not self.path.startswith(self.serves):
            self._answer(404, {"error": "elsewhere", "other_port": self.other_port})
        elif self.path == "/status":
            self._answer(200, STATUS)
            self.status_asked.release()
        elif self.path == "/v2/repository/index":
            self._answer(200, [{"name": "resnet18"}])
        elif self.path.endswith("/load"):
            for _ in range(2):  # the first answer was shown when the second question comes
                self.status_asked.acquire(timeout=30)
            if self.hangs:
                self.rfile.read(1)  # until the client closes the connection
            elif self.interrupts:
                main_thread = threading.main_thread().ident
                assert main_thread is not None
                signal.pthread_kill(main_thread, signal.SIGINT)
                self.rfile.read(1)  # until the client closes the connection
            else:
                self._answer(200, {"name": "resnet18", "version": "2", "weights": "random:1"})
        else:
            self._answer(200, *self.steps)

    def _answer(self, status: int, *lines: object) -> None:
        self.answer(status, "\n".join(map(json.dumps, lines)).encode())


@contextlib.contextmanager
def service(*steps: dict[str, Any], interrupts: bool = False, hangs: bool = False) -> Iterator[tuple[str, str]]:
    """The URLs of the HTTP API and of the admin port of a service."""
    asked = threading.Semaphore(0)
    http: Any = type("Http", (Port,), {"serves": ("/status", "/predict"), "status_asked": asked})
    own = {"serves": ("/admin", "/v2/repository"), "steps": list(steps), "status_asked": asked}
    operations: Any = type("Admin", (Port,), {**own, "interrupts": interrupts, "hangs": hangs})
    with serving(http) as http_url, serving(operations) as admin_url:
        http.other_port, operations.other_port = (int(url.rpartition(":")[2]) for url in (admin_url, http_url))
        yield http_url, admin_url


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "_FOLLOW_S", 0.01)


@pytest.mark.parametrize("option", ["--operations-url", "--url"])
@pytest.mark.parametrize("port", [0, 1], ids=["http", "admin"])
def test_restart_finds_the_admin_port_from_either_url(
    capsys: pytest.CaptureFixture[str], option: str, port: int
) -> None:
    with service(RESTARTING, RESTARTED, {"state": "done", "restarted": 1}) as urls:
        assert main(["rolling-restart", option, urls[port]]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["1/2 w0 (s0.r0): stopped after 0.5 s, serving after 2.5 s", "1 workers restarted"]


@pytest.mark.parametrize("more", ["", ",http://127.0.0.1:1"], ids=["one", "several"])
def test_restart_uses_the_service_of_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    with service(RESTARTING, RESTARTED, {"state": "done", "restarted": 1}) as urls:
        monkeypatch.setenv("MULTIWORLD_URL", urls[0] + more)
        assert main(["rolling-restart"]) == 0
    assert "1 workers restarted" in capsys.readouterr().out


def test_status_finds_the_http_port_from_the_admin_port(capsys: pytest.CaptureFixture[str]) -> None:
    with service() as (_, admin_url):
        assert main(["status", "--json", "--url", admin_url]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_load_says_what_it_waits_for_and_for_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    with service() as (_, admin_url):
        assert main(["load-version", "random:1", "--operations-url", admin_url, "--timeout-s", "50"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "resnet18 answers with random:1, version 2\n"
    assert re.fullmatch(
        r"multiworld: loading random:1: leader-0 waits for w1 \(s0\.r1\) to load its stage; "
        r"1 of 3 workers \(w0\) have passed the self-test \(\d+ s of at most 50 s\)",
        shown.err.splitlines()[0],
    )


def test_ctrl_c_during_a_load_says_what_serves(capsys: pytest.CaptureFixture[str]) -> None:
    with service(interrupts=True) as (_, admin_url):
        assert main(["load-version", "random:1", "--operations-url", admin_url]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        "multiworld: interrupted: 1 of 3 workers (w0) have passed the self-test; the service cancels the load; "
        "resnet18 answers with random:0"
    )


def test_restart_that_takes_too_long_says_what_was_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([0.0, 1.0, 2.0])
    monkeypatch.setattr(admin, "_monotonic", lambda: next(seconds, 9.0))
    with service(RESTARTING, RESTARTED, {**RESTARTING, "worker": "w1", "number": 2}) as (_, admin_url):
        assert main(["rolling-restart", "--operations-url", admin_url, "--timeout-s", "5"]) == 1
    assert "not done within 5 s: 1 of 2 workers restarted; the service finishes w1 and stops" in capsys.readouterr().err


def test_load_that_takes_too_long_says_what_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    with service(hangs=True) as (_, admin_url):
        assert main(["load-version", "random:1", "--operations-url", admin_url, "--timeout-s", "4"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "did not answer within 4 s; increase --timeout-s: 1 of 3 workers (w0) have passed the self-test" in error


def test_url_of_the_join_port_is_refused_with_a_hint() -> None:
    """A world manager sends its greeting before it reads anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"\x00\x01multiworld\r\n" * 4)
                connection.recv(4096)

        thread = threading.Thread(target=greet)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with (
            pytest.raises(
                ServiceError, match="it may be the join port of workers; give the URL of the HTTP API with --url"
            ),
            http_errors(url),
        ):
            httpx.get(url, timeout=30)
        thread.join()
