"""The health check of a container: healthy, unhealthy, not responding, or not listening."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from multiworld_serving.deploy.health import health_error, main


@contextmanager
def answering(status: int) -> Iterator[str]:
    """A server that answers with this status; returns its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"says the server")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/readyz"
        finally:
            server.shutdown()
            thread.join()


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


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["leader:8000"], ["https://127.0.0.1:8000/"]])
def test_usage_is_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    assert capsys.readouterr().err.count("\n") == 1
