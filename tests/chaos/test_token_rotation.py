"""Rotation of the join token while the service runs: no request fails; only workers with the new token can join."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from multiworld_serving.testing.local_service import LocalService
from tests.chaos.clients import answers, assert_nothing_lost, external_worker, run_load
from tests.services import service_for_workers

pytestmark = pytest.mark.timeout(900)

WAIT_S = 240.0
EXIT_REFUSED = 2


def rotate(service: LocalService, file: Path, *tokens: str) -> None:
    """Rotate like an operator: change the file, then send the signal."""
    seen = len(service.lines)
    file.write_text("\n".join(tokens))
    os.kill(service.pid, signal.SIGHUP)
    told = service.wait_for(lambda line: "reloaded the join tokens" in line.message, WAIT_S, after=seen)
    assert int(told["tokens"]) == len(tokens)


def test_token_rotation_fails_no_request(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("former")
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(service_for_workers(file))
        old = stack.enter_context(external_worker(service.join_address, name="old", token="former"))
        service.wait_until_complete(WAIT_S)
        with run_load(service) as load:
            rotate(service, file, "new", "former")
            stack.enter_context(external_worker(service.join_address, name="new", token="new"))
            service.wait_for(lambda line: line["worker"] == "new" and "->ready" in line.message, WAIT_S)
            rotate(service, file, "new")
            assert old.poll() is None, "connected workers stay connected"
            old.terminate()
            assert old.wait(WAIT_S) == 0
            assert answers(service) == [200, 200, 200]
        assert_nothing_lost(service, load)
        with external_worker(service.join_address, name="late", token="former") as late:
            assert late.wait(WAIT_S) == EXIT_REFUSED
