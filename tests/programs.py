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
        pytest.skip(f"{name} is not installed: apt-get install prometheus prometheus-alertmanager haproxy")
    return path


def free_port() -> int:
    """A free port, for programs that cannot report which port they got when asked for any."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
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
