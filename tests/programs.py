"""External programs that tests start: their paths, ports and processes."""

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest


def program(name: str) -> str:
    """Path of a program from Debian's packages; skips the test if it is missing."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed: apt-get install prometheus prometheus-alertmanager haproxy redis-server")
    return path


def free_port(*, hold: bool = True) -> int:
    """A free port, for programs that cannot report which port they got when asked for any.

    Args:
        hold: bind it until this process ends, so that nobody else gets it. The program must set SO_REUSEADDR.
    """
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    port: int = probe.getsockname()[1]
    if hold:
        probe.detach()
    probe.close()
    return port


@contextlib.contextmanager
def process(*command: str, log: Any) -> Iterator[None]:
    """A process while the block lasts."""
    running = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        running.terminate()
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
