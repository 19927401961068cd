"""The supervisor's record of its children's signs of life: who sent the last one, and how long ago."""

import asyncio
import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from multiworld_serving.server.supervisor import notify
from multiworld_serving.server.supervisor.notify import NotifyListener

SEND = """
import os, socket, sys
sys.stdin.readline()
name = os.environ["NOTIFY_SOCKET"]
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"WATCHDOG=1", chr(0) + name[1:])
"""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for the module `time`."""
    made: Any = SimpleNamespace(now_s=1000.0, monotonic=lambda: made.now_s)
    monkeypatch.setattr(notify, "time", made)
    return made


def say(listener: NotifyListener, text: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(text.encode(), "\0" + listener.environment["NOTIFY_SOCKET"][1:])


async def test_silence_is_counted_from_the_last_message(clock: Any) -> None:
    with NotifyListener() as listener, listener.receiving():
        clock.now_s += 100
        assert listener.silent_s(os.getpid()) == 0, "it never sent anything, so it may still be starting"
        say(listener, "READY=1")
        assert listener.silent_s(os.getpid()) == 0
        clock.now_s += 3
        assert listener.silent_s(os.getpid()) == 3
        say(listener, "WATCHDOG=1")
        assert listener.silent_s(os.getpid()) == 0
        assert listener.silent_s(os.getppid()) == 0


async def test_message_counts_as_received_when_this_process_was_blocked_meanwhile(clock: Any) -> None:
    with NotifyListener() as listener, listener.receiving():
        say(listener, "READY=1")
        await asyncio.sleep(0)
        for _ in range(10):
            say(listener, "WATCHDOG=1")
        clock.now_s += 60  # no turn of the event loop in between
        assert listener.silent_s(os.getpid()) == 0


async def test_children_are_told_apart_by_the_kernel_and_not_by_what_they_say(clock: Any) -> None:
    with NotifyListener() as listener, listener.receiving():
        environment = {**os.environ, **listener.environment}
        command = [sys.executable, "-I", "-S", "-c", SEND]
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as child:  # noqa: ASYNC220 - it ends at once
            child.communicate(b"\n")
            heard = set(listener._heard_s)
            listener.silent_s(0)
            assert set(listener._heard_s) - heard == {child.pid}
        clock.now_s += 2
        assert listener.silent_s(child.pid) == 2
        assert listener.silent_s(os.getpid()) == 0


async def test_error_of_a_child_is_no_sign_of_life_and_is_told_once() -> None:
    with NotifyListener() as listener, listener.receiving():
        say(listener, "STATUS=the file is missing")
        say(listener, "X_ERROR=OSError: no threads")
        assert listener.silent_s(os.getpid()) == 0
        assert not listener.heard(os.getpid())
        assert [listener.forget(os.getpid()) for _ in range(2)] == [
            ("the file is missing", "OSError: no threads"),
            ("", ""),
        ]
