"""The supervisor with small child processes that report through a named pipe: programs, and where it matters also forks."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from multiworld_serving.server.supervisor.child_process import ChildProcess
from multiworld_serving.server.supervisor.supervisor import Backoff, Supervisor
from tests.integration.small_processes import (
    DEAF,
    FOREVER,
    SAY_GOODBYE,
    WITH_GRANDCHILD,
    Reports,
    end_of,
    freeze,
    no_child_left,
)
from tests.waiting import until

NEVER = Backoff(initial_s=1000, max_s=1000)
"""Exceeds the test's time limit if it applies to the first failure."""
AT_ONCE = Backoff(initial_s=0, reset_after_s=3)
SEND = """
import os, signal, socket
def send(text):
    address = "\\0" + os.environ["NOTIFY_SOCKET"][1:]
    socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(text.encode(), address)
"""
DIES = SEND + "send('X_ERROR=OSError: no threads'); sys.exit(1)"
FORWARDED = """
import os, signal, sys
from multiworld_serving.server.supervisor.forwarder import SIGNALS, main
signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
if not (pid := os.fork()):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    print("up", flush=True)
    while True:
        signal.pause()
sys.exit(main(pid))
"""


@pytest.fixture
async def reports(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Reports]:
    forking = getattr(request, "param", "programs") == "forks"
    async with Reports(tmp_path / "reports", forking=forking) as reports:
        yield reports


programs_and_forks = pytest.mark.parametrize("reports", ["programs", "forks"], indirect=True)


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    with no_child_left():
        yield


@programs_and_forks
async def test_killed_process_is_restarted_at_once(reports: Reports) -> None:
    restarts: list[None] = []
    async with reports.supervisor(FOREVER, 2, backoff=NEVER, on_restart=lambda: restarts.append(None)) as supervisor:
        first = {int(slot): int(pid) for slot, pid, _ in [await reports.next(), await reports.next()]}
        await until(lambda: supervisor.pids == first)
        os.kill(first[1], signal.SIGKILL)
        slot, pid, _ = await reports.next()
        assert int(slot) == 1
        await until(lambda: supervisor.pids == {0: first[0], 1: int(pid)})
    assert restarts == [None]
    assert supervisor.restarts == {0: 0, 1: 1}
    assert supervisor.pids == {}


async def test_shutdown_does_not_wait_for_the_backoff(reports: Reports) -> None:
    async with reports.supervisor(FOREVER, backoff=NEVER) as supervisor:
        os.kill(await reports.next_pid(), signal.SIGKILL)
        pid = await reports.next_pid()
        os.kill(pid, signal.SIGKILL)
        await end_of(pid)
    assert supervisor.restarts == {0: 1}


async def test_processes_are_added_and_removed_by_slot(reports: Reports) -> None:
    async with reports.supervisor(SAY_GOODBYE, 1) as workers:
        assert [workers.add(), workers.add()] == [1, 2]
        assert {(await reports.next())[0] for _ in range(3)} == {"0", "1", "2"}
        await workers.remove(1)
        assert (await reports.next())[::2] == ["1", "goodbye"]
        assert workers.restarts.keys() == {0, 2}
        assert workers.add() == 1, "the lowest free number is used again"
        assert (await reports.next())[0] == "1"


@pytest.mark.parametrize("deafness", ["ignores", "frozen"])
async def test_process_is_killed_when_it_does_not_stop_in_time(
    reports: Reports, deafness: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with reports.supervisor(DEAF if deafness == "ignores" else FOREVER, 2, stop_timeout_s=0.05) as supervisor:
        pids = {int(slot): int(pid) for slot, pid, _ in [await reports.next(), await reports.next()]}
        await until(lambda: supervisor.pids == pids)
        if deafness == "frozen":
            for pid in pids.values():
                freeze(pid)
        await supervisor.remove(0)
        assert supervisor.pids == {1: pids[1]}
    assert caplog.text.count("stopped status=SIGKILL") == 2


ADOPTS = """
import ctypes, os, subprocess, time
from multiworld_serving.server.supervisor.child_process import reap_adopted
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: it gets the children of its children, as process 1 does
own = subprocess.Popen(["sh", "-c", "exit 3"], start_new_session=True)
parent = subprocess.Popen(["sh", "-c", "sleep 0.1 & echo $!"], start_new_session=True, stdout=subprocess.PIPE)
adopted, _ = parent.communicate()
os.waitid(os.P_PID, int(adopted), os.WEXITED | os.WNOWAIT)
assert own.wait() == 3
reap_adopted()
assert not os.path.exists(f"/proc/{int(adopted)}")
last = subprocess.Popen(["sh", "-c", "exit 5"], start_new_session=True)
os.waitid(os.P_PID, last.pid, os.WEXITED | os.WNOWAIT)
reap_adopted()
assert last.wait() == 5
"""


def test_processes_of_ended_parents_are_collected_and_own_children_are_not() -> None:
    subprocess.run([sys.executable, "-c", ADOPTS], check=True, timeout=60)


async def test_process_is_retried_when_it_cannot_be_started(reports: Reports, caplog: pytest.LogCaptureFixture) -> None:
    commands = iter([["/nowhere/to/be/found"], reports.command(FOREVER, 0)])
    async with Supervisor(lambda _: ChildProcess.spawn(next(commands), os.environ), 1, reports.notify):
        await reports.next()
    assert "cannot be started" in caplog.text


@programs_and_forks
async def test_process_has_its_own_session_and_its_descendants_are_killed_with_it(reports: Reports) -> None:
    async with reports.supervisor(WITH_GRANDCHILD) as supervisor:
        _, pid, _, grandchild = await reports.next()
        await until(lambda: supervisor.pids)
        assert os.getsid(int(pid)) == int(pid) != os.getsid(0), "Ctrl-C does not reach it"
        os.kill(int(pid), signal.SIGKILL)
        await end_of(int(grandchild))
        await reports.next()


@programs_and_forks
async def test_process_reads_end_of_file_when_the_supervisor_is_killed(reports: Reports) -> None:
    command = (sys.executable, "-m", "tests.integration.small_processes", reports.fifo, str(reports.forking))
    supervisor = await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parents[2])
    try:
        pids = {await reports.next_pid() for _ in range(2)}
    finally:
        supervisor.kill()
        await supervisor.wait()
    assert {(await reports.next())[2] for _ in range(2)} == {"parent-gone"}
    for pid in pids:
        await end_of(pid)


@programs_and_forks
async def test_repeated_kills_leak_nothing(reports: Reports) -> None:
    def open_fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with reports.supervisor(FOREVER, backoff=AT_ONCE) as supervisor:
        pid = await reports.next_pid()
        await until(lambda: supervisor.pids)
        fds, threads = open_fds(), threading.active_count()
        for _ in range(20):
            os.kill(pid, signal.SIGKILL)
            pid = await reports.next_pid()
        await until(lambda: supervisor.restarts == {0: 20})
        await until(lambda: open_fds() <= fds and threading.active_count() <= threads)


async def test_process_is_not_restarted_when_its_settings_are_invalid(
    reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    script = SEND + "send('STATUS=no such device'); sys.exit(2)"
    async with reports.supervisor(script) as supervisor:
        await supervisor.cannot_start.wait()
        assert supervisor._slots[0].supervision is not None
        await supervisor._slots[0].supervision
        assert supervisor.restarts == {0: 0}
    assert "slot=0 refused its settings: no such device" in caplog.text


@pytest.mark.parametrize("message", ["STATUS=no such device", ""])
async def test_process_is_restarted_when_others_were_ready_or_it_reported_nothing(
    message: str, reports: Reports
) -> None:
    ready = "send('READY=1'); report('ready'); signal.pause()" if message else "report('ready'); signal.pause()"
    script = SEND + f"if sys.argv[1] == '0':\n    {ready}\nif {message!r}: send({message!r})\nsys.exit(2)"
    async with reports.supervisor(script) as supervisor:
        await reports.next()
        index = supervisor.add()
        await until(lambda: supervisor.restarts[index] >= 1)
        assert not supervisor.cannot_start.is_set()


async def test_supervisor_says_why_processes_cannot_start_when_all_of_them_end_at_once(
    reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    async with reports.supervisor(DIES, 2, backoff=AT_ONCE) as supervisor:
        await supervisor.cannot_start.wait()
        assert all("OSError: no threads" in text for text in supervisor.failing)
        assert len(supervisor.failing) == 2
    assert "ended 5 times in a row within 3 s of its start: OSError: no threads" in supervisor.error
    assert "slot=0 ended 5 times in a row" in caplog.text


async def test_failing_process_is_named_until_it_lives_and_ends_no_service_that_was_ready(
    reports: Reports, tmp_path: Path
) -> None:
    repaired, changes = tmp_path / "repaired", []
    works = f"sys.argv[1] == '0' or os.path.exists({str(repaired)!r})"
    script = (
        SEND + f"if {works}:\n    send('READY=1'); report('ready'); signal.pause()\nsend('X_ERROR=broken'); sys.exit(1)"
    )
    async with reports.supervisor(script, backoff=AT_ONCE) as supervisor:
        supervisor.on_restart = lambda: changes.append(supervisor.failing)
        await reports.next()
        index = supervisor.add()
        await until(lambda: [each for each in changes if f"slot={index}" in "".join(each)])
        assert not supervisor.cannot_start.is_set()
        repaired.touch()
        await until(lambda: not supervisor.failing)
        assert changes[-1] == []


@programs_and_forks
async def test_process_has_its_environment_and_the_descriptors_of_its_slot_under_the_same_numbers(
    reports: Reports,
) -> None:
    with tempfile.TemporaryFile("w+") as file:
        file.write("of the supervisor")
        file.flush()
        fd = file.fileno()
        script = (
            f"found = os.pread({fd}, 100, 0).decode().split()[-1] if slot == '1' else os.path.exists('/proc/self/fd/{fd}')\n"
            "report(f'{os.environ.get(\"COLOUR\")}-{found}')\nsignal.pause()"
        )

        def start(slot: int) -> ChildProcess:
            return reports.start(script, slot, {"COLOUR": "blue"}, [fd] if slot else [])

        async with Supervisor(start, 2, reports.notify) as supervisor:
            found = {slot: word for slot, _, word in [await reports.next() for _ in range(2)]}
            await until(lambda: len(supervisor.pids) == 2)
    assert found == {"0": "blue-False", "1": "blue-supervisor"}


@programs_and_forks
async def test_signal_reaches_only_the_process_itself(reports: Reports, caplog: pytest.LogCaptureFixture) -> None:
    """A forked process has none of the handlers of its parent, and does not write to the parent's event loop."""
    received: list[None] = []
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, received.append, None)
    try:
        async with reports.supervisor(FOREVER, backoff=NEVER) as supervisor:
            await reports.next()
            supervisor.signal_all(signal.SIGTERM)
            await reports.next()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
    assert "ended status=SIGTERM" in caplog.text
    assert not received


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 7), (signal.SIGHUP, 128 + signal.SIGKILL)])
def test_forwarder_sends_signals_to_the_successor_and_ends_with_its_status(signum: int, status: int) -> None:
    with subprocess.Popen([sys.executable, "-c", FORWARDED], stdout=subprocess.PIPE) as forwarder:
        assert forwarder.stdout is not None
        assert forwarder.stdout.readline() == b"up\n"
        forwarder.send_signal(signum)
        assert forwarder.wait(60) == status
