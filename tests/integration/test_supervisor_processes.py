"""The supervisor with real, small child processes, which report through a named pipe."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deploy.supervisor import Backoff, Supervisor

PRELUDE = """
import os, signal, sys, time
slot, fifo = sys.argv[1:]
def report(word):
    out = os.open(fifo, os.O_WRONLY)
    os.write(out, f"{slot} {os.getpid()} {word}\\n".encode())
    os.close(out)
"""
FOREVER = "report('up'); signal.pause()"
EXIT_WITH_PARENT = "report('up'); sys.stdin.read(); report('parent-gone')"
SAY_GOODBYE = """
def goodbye(signum, frame):
    report('goodbye')
    sys.exit(0)
signal.signal(signal.SIGTERM, goodbye)
report('up')
signal.pause()
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); report('up'); time.sleep(1000)"
WITH_GRANDCHILD = """
if not (grandchild := os.fork()):
    os.execvp('sleep', ['sleep', '1000'])
report(f'up {grandchild}')
signal.pause()
"""


class Reports:
    """What the children say, in order: [slot, pid, word, …] each."""

    def __init__(self, fifo: Path) -> None:
        os.mkfifo(fifo)
        self.fifo = fifo
        self._queue: asyncio.Queue[list[str]] = asyncio.Queue()
        self._fd = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)

    def listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def _read(self) -> None:
        for line in os.read(self._fd, 65536).decode().splitlines():
            self._queue.put_nowait(line.split())

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)

    async def next(self) -> list[str]:
        async with asyncio.timeout(30):
            return await self._queue.get()

    async def next_pid(self) -> int:
        return int((await self.next())[1])

    def command(self, script: str, slot: int) -> Sequence[str]:
        return [sys.executable, "-I", "-S", "-c", PRELUDE + script, str(slot), str(self.fifo)]

    def supervisor(self, script: str, count: int = 1, **options: Any) -> Supervisor:
        return Supervisor(lambda slot: self.command(script, slot), count, **options)


@pytest.fixture
async def reports(tmp_path: Path) -> AsyncIterator[Reports]:
    reports = Reports(tmp_path / "reports")
    reports.listen()
    yield reports
    reports.close()


def children() -> set[int]:
    """Process ids of this process's children, ended ones that nobody has reaped included."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that thread has ended meanwhile
            found.update(map(int, (task / "children").read_text().split()))
    return found


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    before = children()  # of other tests that share a service or a crew
    yield
    assert children() <= before


def freeze(pid: int) -> None:
    """SIGSTOP a child and wait until it stands still: were SIGTERM pending as well, that would act first."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


async def end_of(pid: int) -> None:
    """Wait until a process, anybody's child, has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(30):
            await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


async def test_every_slot_has_a_process_when_entered(reports: Reports) -> None:
    async with reports.supervisor(FOREVER, 3) as supervisor:
        ups = [await reports.next() for _ in range(3)]
        assert {int(slot): int(pid) for slot, pid, _ in ups} == supervisor.pids
    assert supervisor.pids == {}


async def test_process_is_started_again_at_once_when_killed(reports: Reports) -> None:
    restarted: list[int] = []
    # A backoff that would outlast the test, did it apply to the first end.
    backoff = Backoff(initial_s=1000, max_s=1000)
    async with reports.supervisor(FOREVER, 2, backoff=backoff, on_restart=restarted.append) as supervisor:
        first = {int(slot): int(pid) for slot, pid, _ in [await reports.next(), await reports.next()]}
        os.kill(first[1], signal.SIGKILL)
        slot, pid, _ = await reports.next()
        assert int(slot) == 1
        assert int(pid) != first[1]
        assert supervisor.pids == {0: first[0], 1: int(pid)}
    assert restarted == [1]
    assert supervisor.restarts == {0: 0, 1: 1}


@pytest.mark.parametrize("status", [0, 1, 2])
async def test_process_is_started_again_when_it_exits(
    reports: Reports, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with reports.supervisor(f"report('up'); sys.exit({status})", backoff=Backoff(initial_s=0)) as supervisor:
        pids = {await reports.next_pid() for _ in range(4)}
    assert len(pids) == 4
    assert supervisor.restarts[0] >= 3
    assert f"ended status={status}" in caplog.text


async def test_backoff_is_forgotten_when_reset(reports: Reports) -> None:
    async with reports.supervisor(FOREVER, backoff=Backoff(initial_s=1000, max_s=1000)) as supervisor:
        for _ in range(5):
            os.kill(await reports.next_pid(), signal.SIGKILL)
            supervisor.proven("local-0")
        await reports.next()


async def test_backoff_is_forgotten_when_it_lived_long_enough(reports: Reports) -> None:
    async with reports.supervisor(FOREVER, backoff=Backoff(initial_s=1000, max_s=1000, reset_after_s=0)):
        for _ in range(5):
            os.kill(await reports.next_pid(), signal.SIGKILL)
        await reports.next()


async def test_leaving_does_not_wait_for_the_backoff(reports: Reports) -> None:
    async with reports.supervisor(FOREVER, backoff=Backoff(initial_s=1000, max_s=1000)) as supervisor:
        os.kill(await reports.next_pid(), signal.SIGKILL)
        pid = await reports.next_pid()
        os.kill(pid, signal.SIGKILL)
        await end_of(pid)
    assert supervisor.restarts == {0: 1}


async def test_process_may_finish_when_stopped(reports: Reports) -> None:
    async with reports.supervisor(SAY_GOODBYE, 2):
        await reports.next()
        await reports.next()
    assert {(await reports.next())[2] for _ in range(2)} == {"goodbye"}


@pytest.mark.parametrize("deafness", ["ignores", "frozen"])
async def test_process_is_killed_when_it_does_not_stop_in_time(
    reports: Reports, deafness: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with reports.supervisor(DEAF if deafness == "ignores" else FOREVER, stop_timeout_s=0.05):
        pid = await reports.next_pid()
        if deafness == "frozen":
            freeze(pid)
    assert "stopping signal=SIGKILL" in caplog.text
    assert "stopped status=SIGKILL" in caplog.text


async def test_process_is_killed_at_once_when_leaving_is_cancelled(reports: Reports) -> None:
    async def run() -> None:
        async with reports.supervisor(DEAF, stop_timeout_s=1000):
            await reports.next()
            stopping.set()

    stopping = asyncio.Event()
    task = asyncio.create_task(run())
    await stopping.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_nothing_is_left_when_the_block_ends_before_a_process_was_started(reports: Reports) -> None:
    async with reports.supervisor(FOREVER, 2):
        pass


async def test_error_of_the_block_is_raised_when_it_fails(reports: Reports) -> None:
    async def run() -> None:
        async with reports.supervisor(FOREVER, 2):
            await reports.next()
            raise RuntimeError("of the block")

    with pytest.raises(RuntimeError, match="of the block"):
        await run()


async def test_block_is_ended_when_a_callback_fails(reports: Reports) -> None:
    def fail(slot: int) -> None:
        raise RuntimeError("of the callback")

    async def run() -> None:
        async with reports.supervisor(FOREVER, 2, on_restart=fail):
            os.kill(await reports.next_pid(), signal.SIGKILL)
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as raised:
        await run()
    assert raised.group_contains(RuntimeError, match="of the callback")


async def test_process_is_tried_again_when_it_cannot_be_started(
    reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    commands = iter([["/nowhere/to/be/found"], reports.command(FOREVER, 0)])
    async with Supervisor(lambda _: next(commands), 1):
        await reports.next()
    assert "cannot be started" in caplog.text


async def test_process_leads_its_own_session_so_that_ctrl_c_does_not_reach_it(reports: Reports) -> None:
    async with reports.supervisor(FOREVER):
        pid = await reports.next_pid()
        assert os.getsid(pid) == pid != os.getsid(0)


async def test_what_a_process_started_is_killed_when_it_ends(reports: Reports) -> None:
    async with reports.supervisor(WITH_GRANDCHILD):
        _, pid, _, grandchild = await reports.next()
        os.kill(int(pid), signal.SIGKILL)
        await end_of(int(grandchild))
        await reports.next()


async def test_environment_is_the_one_given(reports: Reports) -> None:
    script = "report(os.environ.get('COLOUR', 'none')); signal.pause()"
    async with reports.supervisor(script, environment={"COLOUR": "blue"}):
        assert (await reports.next())[2] == "blue"


async def test_process_reads_end_of_file_when_the_supervisor_is_killed(reports: Reports, tmp_path: Path) -> None:
    leader_script = tmp_path / "leader.py"
    leader_script.write_text(
        "import asyncio, sys\n"
        "from deploy.supervisor import Supervisor\n"
        "async def main():\n"
        "    async with Supervisor(lambda slot: [*sys.argv[1:-2], str(slot), sys.argv[-1]], 2):\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    root = str(Path(__file__).parents[2])
    command = [sys.executable, str(leader_script), *reports.command(EXIT_WITH_PARENT, 0)]
    leader = await asyncio.create_subprocess_exec(*command, env={**os.environ, "PYTHONPATH": root})
    try:
        pids = {await reports.next_pid() for _ in range(2)}
    finally:
        leader.kill()
        await leader.wait()
    assert {(await reports.next())[2] for _ in range(2)} == {"parent-gone"}
    for pid in pids:
        await end_of(pid)


async def test_nothing_grows_when_a_process_is_killed_again_and_again(reports: Reports) -> None:
    def open_fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with reports.supervisor(FOREVER, backoff=Backoff(initial_s=0)) as supervisor:
        pid = await reports.next_pid()
        fds, threads = open_fds(), threading.active_count()
        for _ in range(20):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            pid = await reports.next_pid()
        assert (open_fds(), threading.active_count()) == (fds, threads)
    assert supervisor.restarts == {0: 20}


BECOME = "report('reserve'); import json; command = json.loads(sys.stdin.readline()); os.execvp(command[0], command)"


async def test_reserve_becomes_the_next_worker_when_one_ends(reports: Reports) -> None:
    async with reports.supervisor(FOREVER, reserve=reports.command(BECOME, 9)) as supervisor:
        first = await reports.next_pid()
        supervisor.proven("local-0")
        slot, reserve, word = await reports.next()
        assert (slot, word) == ("9", "reserve")
        os.kill(first, signal.SIGKILL)
        assert await reports.next() == ["0", reserve, "up"]
        assert supervisor.pids == {0: int(reserve)}


async def test_worker_is_started_anew_when_the_reserve_has_died(reports: Reports) -> None:
    async with reports.supervisor(FOREVER, reserve=reports.command(BECOME, 9)) as supervisor:
        first = await reports.next_pid()
        supervisor.proven("local-0")
        reserve = await reports.next_pid()
        os.kill(reserve, signal.SIGKILL)
        await end_of(reserve)
        os.kill(first, signal.SIGKILL)
        slot, pid, word = await reports.next()
        assert (slot, word) == ("0", "up")
        assert int(pid) not in (first, reserve)


async def test_process_that_lives_and_never_comes_to_the_leader_is_killed_and_started_again(reports: Reports) -> None:
    async with reports.supervisor(FOREVER, 2, absent_timeout_s=2.0, backoff=Backoff(initial_s=0)) as supervisor:
        pids = {slot: int(pid) for slot, pid, _ in [await reports.next() for _ in range(2)]}
        supervisor.present({"local-1"})
        slot, pid, _ = await reports.next()
        assert slot == "0"
        assert int(pid) != pids["0"]
        assert supervisor.pids[1] == pids["1"]
        supervisor.present({"local-0", "local-1"})
