"""The supervisor's decisions and the settings it passes to workers, without processes."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import SecretStr

from multiworld_serving.deploy.processes.child_process import status_text
from multiworld_serving.deploy.processes.environment import fair_threads, program_environment, worker_environment
from multiworld_serving.deploy.processes.fork_server import ForkServer
from multiworld_serving.deploy.processes.service import _Service
from multiworld_serving.deploy.processes.supervisor import Backoff, Supervisor
from multiworld_serving.server.settings import ServeSettings

SETTINGS = ServeSettings(
    token=SecretStr("of-the-operator"),
    local_token=SecretStr("of-the-service"),
    stages=2,
    replicas=3,
    threads=2,
    log_format="json",
    http_port=0,
    join_port=0,
    metrics_port=0,
)
NOTIFY = {"NOTIFY_SOCKET": "@of-the-service", "WATCHDOG_USEC": "2000000"}


@contextlib.contextmanager
def local_workers(settings: ServeSettings) -> Iterator[Supervisor]:
    """The supervisor of the local workers of a service."""
    with contextlib.ExitStack() as stack:
        service = _Service(settings, stack)
        yield service._workers(cast(ForkServer, None))


def handed_on(supervisor: Supervisor, slot: int) -> dict[str, Any]:
    """The settings of the worker in this slot."""
    found: dict[str, Any] = json.loads(Path(supervisor._command(slot)[-1]).read_text())
    return found


def test_first_restart_has_no_delay() -> None:
    assert Backoff(initial_s=1).delay_s(1, jitter=0) == 0


def test_delay_doubles_up_to_its_limit_when_failures_continue() -> None:
    backoff = Backoff(initial_s=0.1, max_s=5)
    assert [backoff.delay_s(n, jitter=0) for n in range(2, 10)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5]
    assert backoff.delay_s(1_000_000, jitter=0) == 5


def test_jitter_shortens_the_delay_by_up_to_half() -> None:
    assert Backoff(initial_s=4, max_s=4).delay_s(2, jitter=1) == 2


@pytest.mark.parametrize(
    ("returncode", "text"),
    [(0, "0"), (2, "2"), (-9, "SIGKILL"), (-11, "SIGSEGV"), (-64, "SIGRTMAX"), (-99, "signal 99")],
)
def test_status_names_the_signal(returncode: int, text: str) -> None:
    assert status_text(returncode) == text


def test_threads_are_divided_among_workers() -> None:
    cores = len(os.sched_getaffinity(0))
    assert fair_threads(1) == cores
    assert fair_threads(10 * cores) == 1


def test_environment_has_no_settings_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIWORLD_TOKEN", "of-the-operator")
    monkeypatch.setenv("multiworld_name", "leader")
    monkeypatch.setenv("NOTIFY_SOCKET", "/of/systemd")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    monkeypatch.setenv("COLOUR", "blue")
    for environment, threads in ((worker_environment(2, NOTIFY), "2"), (program_environment(NOTIFY), "1")):
        assert not [name for name in environment if name.upper().startswith("MULTIWORLD_")]
        assert environment["COLOUR"] == "blue"
        assert environment.items() >= NOTIFY.items()
        assert "WATCHDOG_PID" not in environment, "it would make the child believe that nobody watches it"
        assert environment["OMP_NUM_THREADS"] == threads


def test_worker_is_named_first_and_the_token_is_not_in_its_command() -> None:
    with local_workers(SETTINGS) as supervisor:
        command = supervisor._command(4)
        assert "of-the-service" in Path(command[-1]).read_text()
    assert sorted(supervisor.restarts) == list(range(6))
    assert command[0] == sys.executable
    assert command[command.index("worker") :][1:3] == ["--name", "local-4"]
    assert not any("of-the" in part for part in command)


def test_workers_divide_the_cores_by_default() -> None:
    with local_workers(SETTINGS) as supervisor:
        assert "cores_file" not in handed_on(supervisor, 0)
    with local_workers(SETTINGS.model_copy(update={"threads": 0})) as supervisor:
        said = [handed_on(supervisor, slot) for slot in range(6)]
        assert {each["cores_file"] for each in said} == {said[0]["cores_file"]}
        assert [each["cores_index"] for each in said] == list(range(6))
        assert os.path.exists(said[0]["cores_file"])


def test_service_has_no_local_workers_when_they_come_from_elsewhere() -> None:
    with local_workers(SETTINGS.model_copy(update={"external_workers": True})) as supervisor:
        assert not supervisor.restarts


def test_threads_release_their_core_soon_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert int(worker_environment(1, NOTIFY)["GOMP_SPINCOUNT"]) > 0
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert worker_environment(1, NOTIFY)["GOMP_SPINCOUNT"] == "7"
