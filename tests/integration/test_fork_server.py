"""Processes forked from a server that has imported everything, and the fallback when that server fails."""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from multiworld_serving.deploy.processes import fork_server
from multiworld_serving.deploy.processes.supervisor import Backoff
from tests.integration.small_processes import (
    FOREVER,
    IMPORT,
    SERVE,
    Reports,
    end_of,
    no_child_left,
)
from tests.waiting import until

CANNOT_FORK = "os.fork = lambda: os.open('/nowhere', 0)\n"
HAS_A_THREAD = "import threading; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"


@pytest.fixture
async def reports(tmp_path: Path) -> AsyncIterator[Reports]:
    async with Reports(tmp_path / "reports", forking=True) as reports:
        yield reports


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    with no_child_left():
        yield


def pid_of(server: fork_server.ForkServer) -> int:
    assert server._process is not None
    return server._process.pid


async def test_processes_survive_the_fork_server_and_their_exit_status_is_known(
    reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    server = reports.fork_server()
    script = "report('up'); signal.signal(signal.SIGHUP, lambda *_: sys.exit(3)); report('waits'); signal.pause()"
    async with reports.supervisor(script, fork_server=server, backoff=Backoff(1000, 1000)) as supervisor:
        while (await reports.next())[2] != "waits":
            pass
        await until(lambda: supervisor.pids)
        os.kill(pid_of(server), signal.SIGKILL)
        await end_of(pid_of(server))
        supervisor.signal_all(signal.SIGHUP)
        await reports.next()
    assert "ended status=3" in caplog.text


async def test_process_is_spawned_when_the_fork_server_died_and_the_next_is_forked(
    reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    server = reports.fork_server()
    async with reports.supervisor(FOREVER, fork_server=server, backoff=Backoff(initial_s=0)) as supervisor:
        pid, first = await reports.next_pid(), pid_of(server)
        await until(lambda: supervisor.pids)
        os.kill(first, signal.SIGKILL)
        await end_of(first)
        os.kill(pid, signal.SIGKILL)
        pid = await reports.next_pid()
        assert caplog.text.count("has failed") == 1
        assert pid_of(server) != first
        os.kill(pid, signal.SIGKILL)
        await reports.next()
        assert caplog.text.count("has failed") == 1


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("sys.exit(1)", "it has ended"),
        ("time.sleep(1000)", "TimeoutError"),
        (IMPORT + HAS_A_THREAD + SERVE, "started a thread"),
        (IMPORT + CANNOT_FORK + SERVE, "No such file"),
    ],
    ids=["ends", "hangs", "has threads", "cannot fork"],
)
async def test_processes_are_spawned_when_the_fork_server_cannot_fork(
    reports: Reports, server: str, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if said == "TimeoutError":
        monkeypatch.setattr(fork_server, "IMPORT_TIMEOUT_S", 0.2)
    async with reports.supervisor(FOREVER, 4, fork_server=reports.fork_server(server)) as supervisor:
        pids = {int(slot): int(pid) for slot, pid, _ in [await reports.next() for _ in range(4)]}
        await until(lambda: supervisor.pids == pids)
    assert said in caplog.text
    if said == "TimeoutError":
        assert caplog.text.count(said) == 1, "the others do not wait for the next server"
