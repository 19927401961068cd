"""The supervisor with small child processes, spawned and forked, that report through a named pipe."""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import resource
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from multiworld_serving.deploy.processes.child_process import ChildProcess
from multiworld_serving.deploy.processes.notify import NotifyListener
from multiworld_serving.deploy.processes.service import _Service
from multiworld_serving.deploy.processes.supervisor import _POLL_S, Backoff, Supervisor
from multiworld_serving.server.settings import ServeSettings
from tests.integration.small_processes import (
    DEAF,
    EXIT_WITH_PARENT,
    FOREVER,
    FORK_SERVER,
    ROOT,
    SAY_GOODBYE,
    WITH_GRANDCHILD,
    Reports,
    end_of,
    freeze,
    no_child_left,
)
from tests.waiting import until

ONE_SIGN_OF_LIFE = """
import socket
name = os.environ['NOTIFY_SOCKET']
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'READY=1', chr(0) + name[1:])
report('up')
signal.pause()
"""


@pytest.fixture(params=["programs", "forks"])
async def reports(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Reports]:
    async with Reports(tmp_path / "reports", forking=request.param == "forks") as reports:
        yield reports


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    with no_child_left():
        yield


async def test_every_slot_has_a_process_on_entry(reports: Reports) -> None:
    async with reports.supervisor(FOREVER, 3) as supervisor:
        ups = [await reports.next() for _ in range(3)]
        pids = {int(slot): int(pid) for slot, pid, _ in ups}
        await until(lambda: supervisor.pids == pids)
    assert supervisor.pids == {}


async def test_killed_process_is_restarted_at_once(reports: Reports) -> None:
    restarted: list[int] = []
    # The backoff would exceed the test's time limit if it applied to the first failure.
    backoff = Backoff(initial_s=1000, max_s=1000)
    async with reports.supervisor(FOREVER, 2, backoff=backoff, on_restart=restarted.append) as supervisor:
        first = {int(slot): int(pid) for slot, pid, _ in [await reports.next(), await reports.next()]}
        os.kill(first[1], signal.SIGKILL)
        slot, pid, _ = await reports.next()
        assert int(slot) == 1
        assert int(pid) != first[1]
        await until(lambda: supervisor.pids == {0: first[0], 1: int(pid)})
    assert restarted == [1]
    assert supervisor.restarts == {0: 0, 1: 1}


@pytest.mark.parametrize("status", [0, 1, 3])
async def test_exited_process_is_restarted(reports: Reports, status: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with reports.supervisor(f"report('up'); sys.exit({status})", backoff=Backoff(initial_s=0)) as supervisor:
        pids = {await reports.next_pid() for _ in range(4)}
    assert len(pids) == 4
    assert supervisor.restarts[0] >= 3
    assert f"ended status={status}" in caplog.text


async def test_backoff_restarts_at_zero_after_a_long_run(reports: Reports) -> None:
    async with reports.supervisor(FOREVER, backoff=Backoff(initial_s=1000, max_s=1000, reset_after_s=0)):
        for _ in range(5):
            os.kill(await reports.next_pid(), signal.SIGKILL)
        await reports.next()


async def test_shutdown_does_not_wait_for_the_backoff(reports: Reports) -> None:
    async with reports.supervisor(FOREVER, backoff=Backoff(initial_s=1000, max_s=1000)) as supervisor:
        os.kill(await reports.next_pid(), signal.SIGKILL)
        pid = await reports.next_pid()
        os.kill(pid, signal.SIGKILL)
        await end_of(pid)
    assert supervisor.restarts == {0: 1}


async def test_stopped_process_may_finish(reports: Reports) -> None:
    async with reports.supervisor(SAY_GOODBYE, 2):
        await reports.next()
        await reports.next()
    assert {(await reports.next())[2] for _ in range(2)} == {"goodbye"}


async def test_workers_are_started_and_stopped_by_name_when_the_launcher_scales(reports: Reports) -> None:
    settings = ServeSettings(http_port=0, join_port=0, metrics_port=0, local_token=SecretStr("of-this-test"))
    with contextlib.ExitStack() as stack:
        launcher = _Service(settings, stack)
        async with reports.supervisor(SAY_GOODBYE, 1) as workers:
            launcher._groups = {("worker", "local"): workers}
            pids = {int(slot): int(pid) for slot, pid, _ in [await reports.next()]}
            await launcher.scale_workers(3)
            pids |= {int(slot): int(pid) for slot, pid, _ in [await reports.next(), await reports.next()]}
            assert sorted(pids) == [0, 1, 2]
            await launcher.scale_workers(1)  # stops none
            await until(lambda: workers.pids == pids)
            await launcher.stop_worker("local-1")
            assert await reports.next() == ["1", str(pids.pop(1)), "goodbye"]
            assert {each.name: each.pid for each in await launcher.processes()} == {
                f"local-{slot}": pid for slot, pid in pids.items()
            }
            for name in ("local-1", "local-9", "other-0", "local"):
                with pytest.raises(KeyError):
                    await launcher.stop_worker(name)
            await launcher.scale_workers(3)
            assert (await reports.next())[0] == "1", "the lowest free number is used again"


async def test_removed_process_is_killed_when_it_does_not_stop_in_time(reports: Reports) -> None:
    async with reports.supervisor(DEAF, 2, stop_timeout_s=0.05) as supervisor:
        pids = {int(slot): int(pid) for slot, pid, _ in [await reports.next(), await reports.next()]}
        await until(lambda: supervisor.pids == pids)
        await supervisor.remove(0)
        assert supervisor.pids == {1: pids[1]}


async def test_removed_process_is_not_restarted_when_it_waits_for_a_restart(reports: Reports) -> None:
    async with reports.supervisor(FOREVER, backoff=Backoff(initial_s=1000, max_s=1000)) as supervisor:
        os.kill(await reports.next_pid(), signal.SIGKILL)
        os.kill(await reports.next_pid(), signal.SIGKILL)
        await until(lambda: not supervisor.pids)
        await supervisor.remove(0)
        assert supervisor.restarts == {}


@pytest.mark.parametrize("deafness", ["ignores", "frozen"])
async def test_process_is_killed_when_it_does_not_stop_in_time(
    reports: Reports, deafness: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with reports.supervisor(DEAF if deafness == "ignores" else FOREVER, stop_timeout_s=0.05) as supervisor:
        pid = await reports.next_pid()
        await until(lambda: supervisor.pids)
        if deafness == "frozen":
            freeze(pid)
    assert "stopping signal=SIGKILL" in caplog.text
    assert "stopped status=SIGKILL" in caplog.text


async def test_process_is_killed_at_once_when_shutdown_is_cancelled(reports: Reports) -> None:
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


async def test_nothing_is_left_when_the_block_ends_before_a_process_starts(reports: Reports) -> None:
    async with reports.supervisor(FOREVER, 2):
        pass


async def test_error_of_the_block_is_raised(reports: Reports) -> None:
    async def run() -> None:
        async with reports.supervisor(FOREVER, 2):
            await reports.next()
            raise RuntimeError("of the block")

    with pytest.raises(RuntimeError, match="of the block"):
        await run()


async def test_slot_is_kept_when_the_restart_callback_fails(reports: Reports, caplog: pytest.LogCaptureFixture) -> None:
    def fail(slot: int) -> None:
        raise RuntimeError("of the callback")

    async with reports.supervisor(FOREVER, on_restart=fail, backoff=Backoff(initial_s=0)) as supervisor:
        for _ in range(2):
            os.kill(await reports.next_pid(), signal.SIGKILL)
        pid = await reports.next_pid()
        await until(lambda: supervisor.pids == {0: pid})
    assert "of the callback" in caplog.text


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Make every call that needs a new descriptor fail with EMFILE until the block ends."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    taken = []
    try:
        with contextlib.suppress(OSError):  # unused numbers below the limit
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_ended_process_is_reaped_when_no_descriptor_is_free(reports: Reports) -> None:
    command = reports.command(FOREVER, 0)
    child = await reports.fork_server().fork(command) if reports.forking else ChildProcess.spawn(command, os.environ)
    assert child is not None
    await reports.next()
    with no_descriptor_left():
        ended = asyncio.create_task(child.ended())
        await asyncio.sleep(0)
        assert not ended.done()
        child.send(signal.SIGKILL)
        async with asyncio.timeout(30):
            await ended
        assert child.reap() == -signal.SIGKILL


async def test_process_is_retried_when_it_cannot_be_started(reports: Reports, caplog: pytest.LogCaptureFixture) -> None:
    commands = iter([["/nowhere/to/be/found"], reports.command(FOREVER, 0)])
    async with Supervisor(lambda _: next(commands), 1):
        await reports.next()
    assert "cannot be started" in caplog.text


async def test_process_leads_its_own_session_and_ctrl_c_does_not_reach_it(reports: Reports) -> None:
    async with reports.supervisor(FOREVER):
        pid = await reports.next_pid()
        assert os.getsid(pid) == pid != os.getsid(0)


async def test_descendants_are_killed_when_their_process_ends(reports: Reports) -> None:
    async with reports.supervisor(WITH_GRANDCHILD) as supervisor:
        _, pid, _, grandchild = await reports.next()
        await until(lambda: supervisor.pids)
        os.kill(int(pid), signal.SIGKILL)
        await end_of(int(grandchild))
        await reports.next()


async def test_process_gets_the_given_environment(reports: Reports) -> None:
    script = "report(os.environ.get('COLOUR', 'none')); signal.pause()"
    async with reports.supervisor(script, environment={"COLOUR": "blue"}):
        assert (await reports.next())[2] == "blue"


async def test_process_reads_end_of_file_when_the_supervisor_is_killed(reports: Reports, tmp_path: Path) -> None:
    leader_script = tmp_path / "leader.py"
    leader_script.write_text(
        "import asyncio, contextlib, json, os, sys\n"
        "from multiworld_serving.deploy.processes.fork_server import ForkServer\n"
        "from multiworld_serving.deploy.processes.supervisor import Supervisor\n"
        "child, server = json.loads(sys.argv[1])\n"
        "async def main():\n"
        "    with ForkServer(server, os.environ) if server else contextlib.nullcontext() as forks:\n"
        "        async with Supervisor(lambda slot: [*child[:-2], str(slot), child[-1]], 2, fork_server=forks):\n"
        "            await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    server = reports.command(FORK_SERVER, 9) if reports.forking else None
    commands = json.dumps([reports.command(EXIT_WITH_PARENT, 0), server])
    leader = await asyncio.create_subprocess_exec(
        sys.executable, str(leader_script), commands, env={**os.environ, "PYTHONPATH": ROOT}
    )
    try:
        pids = {await reports.next_pid() for _ in range(2)}
    finally:
        leader.kill()
        await leader.wait()
    assert {(await reports.next())[2] for _ in range(2)} == {"parent-gone"}
    for pid in pids:
        await end_of(pid)


async def test_repeated_kills_leak_nothing(reports: Reports) -> None:
    def open_fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with reports.supervisor(FOREVER, backoff=Backoff(initial_s=0)) as supervisor:
        pid = await reports.next_pid()
        fds, threads = open_fds(), threading.active_count()
        for _ in range(20):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            pid = await reports.next_pid()
        await until(lambda: open_fds() <= fds and threading.active_count() <= threads)
    assert supervisor.restarts == {0: 20}


async def test_process_is_killed_and_started_again_when_it_gives_no_more_signs_of_life(
    reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    with NotifyListener() as notify, notify.receiving():
        environment = {**os.environ, **notify.environment}
        async with reports.supervisor(
            ONE_SIGN_OF_LIFE,
            environment=environment,
            notify=notify,
            blocked_timeout_s=0.5,
            backoff=Backoff(initial_s=0),
        ) as supervisor:
            first = await reports.next_pid()
            assert await reports.next_pid() != first
            await until(lambda: supervisor.restarts == {0: 1})
            assert notify.silent_s(first) == 0, "its pid may be reused"
    assert "gave no sign of life" in caplog.text
    assert "ended status=SIGKILL" in caplog.text


async def test_process_is_left_alone_when_it_has_never_given_a_sign_of_life(reports: Reports) -> None:
    with NotifyListener() as notify, notify.receiving():
        environment = {**os.environ, **notify.environment}
        async with reports.supervisor(
            FOREVER, 2, environment=environment, notify=notify, blocked_timeout_s=0.001
        ) as supervisor:
            pids = {int(slot): int(pid) for slot, pid, _ in [await reports.next() for _ in range(2)]}
            await until(lambda: supervisor.pids == pids)
            await asyncio.sleep(2 * _POLL_S)  # at least one look at them
            assert supervisor.pids == pids, "one that still imports its modules is not blocked"


async def test_process_is_not_restarted_when_it_refuses_its_settings(reports: Reports) -> None:
    async with reports.supervisor("sys.exit(2)") as supervisor:
        await supervisor.invalid_input.wait()
        (slot,) = supervisor._slots.values()
        assert slot.monitor is not None
        await slot.monitor
        assert supervisor.restarts == {0: 0}


async def test_settings_are_not_invalid_when_a_process_ends_with_status_2_after_a_restart(
    reports: Reports, tmp_path: Path
) -> None:
    statuses = tmp_path / "statuses"
    statuses.write_text("3 2")
    script = (
        f"file = {str(statuses)!r}; first, *rest = open(file).read().split() or ['run']; open(file, 'w').write(' '.join(rest))\n"
        "if first != 'run': sys.exit(int(first))\n"
        "report('up'); signal.pause()"
    )
    async with reports.supervisor(script, backoff=Backoff(initial_s=0)) as supervisor:
        await reports.next()
        await until(lambda: supervisor.restarts == {0: 2})
        assert not supervisor.invalid_input.is_set()


async def test_process_inherits_the_descriptors_of_its_slot_under_the_same_numbers(reports: Reports) -> None:
    with tempfile.TemporaryFile("w+") as file:
        file.write("of the supervisor")
        file.flush()
        fd = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, 200)
        try:
            script = f"report(os.pread({fd}, 100, 0).decode().split()[-1] if slot == '1' else os.path.exists('/proc/self/fd/{fd}'))"
            async with reports.supervisor(
                script + "\nsignal.pause()", 2, fds=lambda slot: [fd] if slot else []
            ) as supervisor:
                found = {slot: word for slot, _, word in [await reports.next() for _ in range(2)]}
                await until(lambda: len(supervisor.pids) == 2)
        finally:
            os.close(fd)
    assert found == {"0": "False", "1": "supervisor"}


async def test_every_process_gets_a_signal_that_is_sent_to_all(reports: Reports) -> None:
    script = "signal.signal(signal.SIGHUP, lambda *_: report('reloaded'))\nreport('up')\nwhile True: signal.pause()"
    async with reports.supervisor(script, 2) as supervisor:
        for _ in range(2):
            await reports.next()
        await until(lambda: len(supervisor.pids) == 2)
        supervisor.signal_all(signal.SIGHUP)
        assert sorted([(await reports.next())[::2] for _ in range(2)]) == [["0", "reloaded"], ["1", "reloaded"]]
