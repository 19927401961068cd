"""Frontends that are killed while clients send requests: the client library hides it from its callers."""

import os
import signal
from pathlib import Path

from tests.chaos.library_clients import WAIT_S, clients
from tests.services import external_frontend, small_service


def test_no_call_fails_when_frontends_end_in_turn(token_file: Path, tmp_path: Path) -> None:
    """One is killed and one is stopped, each with a URL of its own; then those of the last URL are killed."""
    with (
        small_service(frontends=2, token_file=token_file) as service,
        external_frontend(service, "first", tmp_path) as (first_url, first),
        external_frontend(service, "second", tmp_path) as (second_url, second),
        clients(first_url, second_url, service.url) as calls,
    ):
        calls.until_answered(20)
        first.kill()
        first.wait()
        calls.until_answered(20)
        second.terminate()
        second.wait()
        calls.until_answered(20)
        for slot in (0, 1):
            since = len(service.lines)
            os.kill(service.child_pids("frontend")[slot], signal.SIGKILL)
            said = f"frontend-{slot} serves"
            service.wait_for(lambda line, said=said: line.message.startswith(said), WAIT_S, after=since)  # type: ignore[misc]
            calls.until_answered(20)
    assert not calls.failures, calls.failures[:3]
    assert calls.retried
