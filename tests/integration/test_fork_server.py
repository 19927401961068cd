"""Workers forked from a process that has imported everything, and the fallback when that process fails."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from multiworld_serving.deploy.processes import fork_server
from multiworld_serving.deploy.processes.supervisor import Backoff
from multiworld_serving.testing.chaos.system.processes import parent
from tests.integration.small_processes import (
    BECOME,
    EXIT_WITH_PARENT,
    FOREVER,
    Reports,
    children,
    end_of,
    freeze,
    no_child_left,
)
from tests.waiting import until

HANGS = "time.sleep(1000)"
GIVES_AWAY_OTHERS = """
import socket
os.write(0, b'ready')
_, fds, _, _ = socket.recv_fds(socket.socket(fileno=os.dup(0)), 65536, 2)
os.write(fds[1], (1).to_bytes(4, 'little'))
os.write(0, b'{"forked": true}')
time.sleep(1000)
"""
ANSWERS_TOO_LATE = (
    BECOME
    + """
wait = os.waitpid
def slow_wait(*given):
    status = wait(*given)
    time.sleep(1000)
    return status
os.waitpid = slow_wait
sys.exit(run_fork_server(become))
"""
)
WHOSE = "report(f'up {os.getsid(0)}'); signal.pause()"


@pytest.fixture
async def reports(tmp_path: Path) -> AsyncIterator[Reports]:
    async with Reports(tmp_path / "reports", forking=True) as reports:
        yield reports


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    with no_child_left():
        yield


async def test_workers_are_children_of_the_supervisor_and_lead_their_sessions(reports: Reports) -> None:
    async with reports.supervisor(WHOSE, 3) as supervisor:
        ups = [await reports.next() for _ in range(3)]
        assert all(pid == session for _, pid, _, session in ups)
        pids = {int(slot): int(pid) for slot, pid, *_ in ups}
        await until(lambda: supervisor.pids == pids)
        assert {parent(pid) for pid in pids.values()} == {os.getpid()}


@pytest.mark.parametrize("end", ["sys.exit(3)", "os.kill(os.getpid(), signal.SIGSEGV)"])
async def test_supervisor_gets_the_exit_status_when_the_fork_server_is_gone(
    reports: Reports, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    forks = reports.fork_server()
    script = f"report('up'); sys.stdin.readline(); {end}"
    async with reports.supervisor(script, fork_server=forks, backoff=Backoff(initial_s=1000, max_s=1000)) as supervisor:
        await reports.next()
        await until(lambda: supervisor.pids)
        server, child = forks.pid, supervisor._slots[0].child
        assert server is not None
        assert child is not None
        assert child._hold_fd is not None
        os.kill(server, signal.SIGKILL)
        await end_of(server)
        os.write(child._hold_fd, b"\n")
        await reports.next()
    assert ("status=3" if "exit" in end else "status=SIGSEGV") in caplog.text


async def test_worker_is_spawned_when_the_fork_server_died_and_the_next_is_forked(
    reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    forks = reports.fork_server()
    async with reports.supervisor(FOREVER, fork_server=forks, backoff=Backoff(initial_s=0)) as supervisor:
        pid, first = await reports.next_pid(), forks.pid
        await until(lambda: supervisor.pids)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await end_of(first)
        os.kill(pid, signal.SIGKILL)
        pid = await reports.next_pid()
        assert caplog.text.count("has failed") == 1
        assert forks.pid not in (None, first)
        os.kill(pid, signal.SIGKILL)
        await reports.next()
        assert caplog.text.count("has failed") == 1


async def test_worker_is_spawned_when_the_fork_server_is_frozen(
    reports: Reports, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks = reports.fork_server()
    async with reports.supervisor(FOREVER, fork_server=forks) as supervisor:
        pid = await reports.next_pid()
        await until(lambda: supervisor.pids)
        assert forks.pid is not None
        freeze(forks.pid)
        monkeypatch.setattr(fork_server, "FORK_TIMEOUT_S", 0.2)
        os.kill(pid, signal.SIGKILL)
        await reports.next()
    assert "has failed (TimeoutError)" in caplog.text


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("sys.exit(1)", "the fork server has ended"),
        ("os.write(0, b'what?'); time.sleep(1000)", "unexpected message instead of ready"),
        ("os.write(0, b'ready'); time.sleep(1); os.write(0, b'what?'); time.sleep(1000)", "Expecting value"),
        ("os.write(0, b'ready'); time.sleep(1); os.write(0, b'5'); time.sleep(1000)", "iterable"),
        ("os.write(0, b'ready'); time.sleep(1); os.write(0, b'{}'); time.sleep(1000)", "error"),
        (GIVES_AWAY_OTHERS, "No child process"),
        (HANGS, "TimeoutError"),
        (
            BECOME + "import threading; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
            "run_fork_server(become)",
            "started a thread",
        ),
        (BECOME + "os.fork = lambda: os.open('/nowhere', 0)\nrun_fork_server(become)", "No such file"),
    ],
    ids=[
        "ends",
        "sends garbage",
        "sends garbage later",
        "sends a number",
        "is silent",
        "returns foreign pids",
        "hangs",
        "has threads",
        "cannot fork",
    ],
)
async def test_workers_are_spawned_when_the_fork_server_misbehaves(
    reports: Reports, server: str, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if server == HANGS:
        monkeypatch.setattr(fork_server, "IMPORT_TIMEOUT_S", 0.2)
    async with reports.supervisor(FOREVER, 2, fork_server=reports.fork_server(server)) as supervisor:
        ups = [await reports.next() for _ in range(2)]
        pids = {int(slot): int(pid) for slot, pid, _ in ups}
        await until(lambda: supervisor.pids == pids)
    assert said in caplog.text


async def test_workers_are_spawned_when_the_fork_server_cannot_start(
    reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    forks = reports.servers.enter_context(fork_server.ForkServer(["/nowhere/to/be/found"], os.environ))
    async with reports.supervisor(FOREVER, 2, fork_server=forks):
        await reports.next()
        await reports.next()
    assert "cannot start the fork server" in caplog.text


async def test_shutdown_does_not_wait_for_the_fork_server_to_import(reports: Reports) -> None:
    server = "report('importing'); time.sleep(1000)"
    async with reports.supervisor(FOREVER, 2, fork_server=reports.fork_server(server), stop_timeout_s=1000):
        await reports.next()
        left_s = time.monotonic()
    assert time.monotonic() - left_s < 100, "it waited for the server"


async def test_worker_reads_end_of_file_when_its_supervisor_gave_up(reports: Reports) -> None:
    # Slow forks, as on an overloaded machine: the supervisor ends before it gets the pid.
    script = "report('up'); report(f'read={sys.stdin.read()!r}')"
    server = BECOME + (
        "fork = os.fork\n"
        "def slow_fork():\n"
        "    pid = fork()\n"
        "    if pid: report('forking'); time.sleep(1)\n"
        "    return pid\n"
        "os.fork = slow_fork\n"
        "sys.exit(run_fork_server(become))\n"
    )
    forks = reports.fork_server(server)
    task = asyncio.create_task(forks.fork(reports.command(script, 0)))
    said = [(await reports.next())[2]]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while said[-1] != "read=''":
        said.append((await reports.next())[2])
    assert set(said) == {"forking", "up", "read=''"}


async def test_no_zombie_is_left_when_the_fork_reply_is_late(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "FORK_TIMEOUT_S", 1.0)
    forks = reports.fork_server(ANSWERS_TOO_LATE)
    before = children() - {forks.pid}
    assert await forks.fork(reports.command(EXIT_WITH_PARENT, 0)) is None
    await until(lambda: children() - before <= {forks.pid})


async def test_failed_fork_server_does_not_delay_other_workers(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "IMPORT_TIMEOUT_S", 2.0)
    forks = reports.fork_server("time.sleep(1000)")
    began_s = time.monotonic()
    assert await asyncio.gather(*(forks.fork(["anything"]) for _ in range(20))) == [None] * 20
    assert time.monotonic() - began_s < 30, "each waited for its own fork server"


def test_forked_process_has_its_own_title() -> None:
    code = (
        "import sys; from multiworld_serving.deploy.processes.fork_server import set_process_title; "
        "set_process_title(sys.argv[1]); print(open('/proc/self/cmdline').read())"
    )
    for title, room in (("multiworld worker", True), ("x" * 1000, False)):
        said = subprocess.run([sys.executable, "-c", code, title], capture_output=True, text=True, check=True).stdout
        shown = said.strip().strip("\0")
        assert title.startswith(shown)
        assert (shown == title) is room or len(shown) > 900


SLOW_PARENT = """
import os, time
from multiworld_serving.common.config import exit_with_parent
from multiworld_serving.deploy.processes import fork_server

if os.fork() == 0:
    end = os._exit
    os._exit = lambda status: (time.sleep(0.3), end(status))  # as on a busy machine
    fork_server._fork_or_exit()
    exit_with_parent()
    time.sleep(0.6)
    print("alive", flush=True)
    end(0)
os.wait()
"""


def test_child_outlives_the_process_that_forked_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b"alive\n"  # until all have ended
