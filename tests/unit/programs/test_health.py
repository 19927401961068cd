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


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_container_is_healthy_when_its_server_answers_200(
    status: int, healthy: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(status) as url:
        assert main([url]) == (0 if healthy else 1)
    assert ("503: says the server" in capsys.readouterr().err) != healthy


@pytest.mark.parametrize("listens", [False, True], ids=["refuses connections", "reads nothing"])
def test_container_is_unhealthy_when_nothing_answers(listens: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/healthz"
        if not listens:
            listener.close()
        assert "does not answer" in health_error(url, timeout_s=0.2)
