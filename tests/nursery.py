"""Starts the processes of tests. One process imports torch and the programs once, which takes seconds, and forks each in milliseconds."""

import atexit
import contextlib
import importlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from setproctitle import setproctitle

from multiworld_serving.cli.main import run
from multiworld_serving.server.supervisor.programs import THREAD_VARIABLES, import_programs

_PATIENCE_S = 150.0
"""Longest wait for a fork: the import of torch takes longer than a minute on a machine with much other work."""
_REPOSITORY = Path(__file__).parents[1]
_MESSAGE_BYTES = 1 << 18


class ForkedProcess:
    """A process as `subprocess.Popen` represents it.

    Attributes:
        stderr: its standard error; None if the caller has given a descriptor.
        pidfd: readable when it has ended.
    """

    def __init__(self, pid: int, stderr: TextIO | None = None) -> None:
        self.pid = pid
        self.stderr = stderr
        self.returncode: int | None = None
        self.pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        return self._status_within(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended. Raises subprocess.TimeoutExpired."""
        if (status := self._status_within(timeout)) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return status

    def send_signal(self, signum: int) -> None:
        """Does nothing if the process has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _status_within(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            ended = select.poll()
            ended.register(self.pidfd, select.POLLIN)
            if ended.poll(None if timeout_s is None else timeout_s * 1000):
                self.returncode = NURSERY.reap(self.pid)
                os.close(self.pidfd)
        return self.returncode


Process = ForkedProcess | subprocess.Popen[bytes]


class Nursery:
    """The process that forks. Started on first use, ended with the test run."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self, call: str, arguments: Sequence[Any], stderr: int, *fds: int) -> int:
        """Fork a process that calls `call` ("module:function") with `arguments` and its copies of `fds`. Returns its pid.

        It has the environment and the working directory of this process, and ends with the status of a Python program.
        """
        control = self._running()
        what = {"call": call, "arguments": list(arguments), "environment": dict(os.environ), "folder": os.getcwd()}
        socket.send_fds(control, [json.dumps(what).encode()], [stderr, *fds])
        return int(control.recv(64))

    def reap(self, pid: int) -> int:
        """The exit status of a process that has ended, negative for a signal. Must be called once."""
        control = self._running()
        control.sendall(str(pid).encode())
        return int(control.recv(64))

    def stop(self) -> None:
        if self._process is not None and self._control is not None:
            self._control.close()
            self._process.wait(_PATIENCE_S)

    def _running(self) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._control.settimeout(_PATIENCE_S)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                self._control.setsockopt(socket.SOL_SOCKET, option, _MESSAGE_BYTES)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    cwd=_REPOSITORY,
                    env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")},
                )
            atexit.register(self.stop)
        return self._control


NURSERY = Nursery()


def start_program(arguments: Sequence[str], call: str = "") -> ForkedProcess:
    """Fork `multiworld` with these arguments; its standard error can be read from `stderr`."""
    reader, writer = os.pipe()
    try:
        return fork_program(arguments, writer, reader, call)
    finally:
        os.close(writer)


def fork_program(
    arguments: Sequence[str], stderr: int, log: int | None = None, call: str = "", **environment: str
) -> ForkedProcess:
    """Fork `multiworld` with these arguments.

    Args:
        stderr: descriptor of its standard error.
        log: descriptor from which the caller reads it.
        call: "module:function" that takes the arguments, instead of that of `multiworld`.
        environment: settings of the service. It has no others of this process.
    """
    pid = NURSERY.fork(call or f"{__name__}:run_program", [list(arguments), environment], stderr)
    return ForkedProcess(pid, None if log is None else os.fdopen(log, encoding="utf-8", errors="replace"))


def run_program(arguments: list[str], environment: dict[str, str]) -> None:
    """In a forked process: run `multiworld` with these arguments."""
    setproctitle(" ".join(["multiworld", *arguments]))  # a campaign finds the supervisor by it
    for name in [name for name in os.environ if name.startswith("MULTIWORLD_")]:
        del os.environ[name]
    os.environ.update(environment)
    setattr(logging.Handler, "handleError", _raise_error)  # noqa: B010 - mypy rejects the assignment
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.close(devnull)
    run(arguments)


def _raise_error(handler: logging.Handler, record: logging.LogRecord) -> None:
    """Raise the error of a line that cannot be formatted, as pytest does. One that cannot be written is ignored."""
    if not isinstance(sys.exception(), OSError):
        raise  # noqa: PLE0704 - called while the error is handled


def _main(control: socket.socket) -> None:
    """Handle messages. One with descriptors forks a process. One without them is the id of an ended process: reply with its status."""
    assert import_programs(threads=1), "a process with several threads cannot fork"
    importlib.import_module("tests.integration.members")
    while True:
        message, fds, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 8)
        if not message:
            return
        if not fds:
            _, status = os.waitpid(int(message), 0)
            control.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if not pid:
            control.close()
            _child(json.loads(message), *fds)
            return  # ends like a normal program, with an exit status and atexit handlers
        for fd in fds:
            os.close(fd)
        control.sendall(str(pid).encode())


def _child(what: dict[str, Any], stderr: int, *fds: int) -> None:
    os.dup2(stderr, 2)
    os.close(stderr)
    setproctitle(what["call"])  # before the environment changes, whose memory it uses
    os.environ.clear()
    os.environ.update(what["environment"])
    os.chdir(what["folder"])
    module, _, function = what["call"].partition(":")
    getattr(importlib.import_module(module), function)(*what["arguments"], *fds)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
