"""The health check of a container: healthy, unhealthy, not responding, or not listening."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from multiworld_serving.deploy.health import health_error, main
from tests.http_server import QuietHandler, serving


@contextmanager
def answering(status: int) -> Iterator[str]:
    """A server that answers with this status; returns its address."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.answer(status, b"says the server")

    with serving(Handler) as url:
        yield f"{url}/readyz"


def test_status_200_is_healthy() -> None:
    with answering(200) as url:
        assert main([url]) == 0


def test_other_status_is_unhealthy(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(503) as url:
        assert main([url]) == 1
    assert "503: says the server" in capsys.readouterr().err


def test_refused_connection_is_unhealthy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert "does not answer" in health_error(f"http://127.0.0.1:{port}/healthz")


def test_unresponsive_server_is_unhealthy() -> None:
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as listener:  # the kernel accepts the connection, and no process reads it
        port = listener.getsockname()[1]
        assert "does not answer" in health_error(f"http://127.0.0.1:{port}/healthz", timeout_s=0.2)
