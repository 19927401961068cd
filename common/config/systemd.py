"""Notifies systemd of a service of Type=notify; see sd_notify(3)."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def notify_systemd() -> AsyncIterator[None]:
    """Send READY=1 when the block starts and STOPPING=1 when it ends. Does nothing without systemd.

    With WatchdogSec=, the event loop sends WATCHDOG=1 twice in that time, so systemd restarts a process whose loop is blocked.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(
        os.getpid()
    ):  # set for the parent process
        yield
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as sock:
        _tell(sock, address, "READY=1")
        beating = asyncio.create_task(_beat(sock, address))
        try:
            yield
        finally:
            beating.cancel()
            _tell(sock, address, "STOPPING=1")


async def _beat(sock: socket.socket, address: str) -> None:
    limit_us = os.environ.get("WATCHDOG_USEC", "")
    while limit_us.isdecimal() and int(limit_us):
        _tell(sock, address, "WATCHDOG=1")
        await asyncio.sleep(int(limit_us) / 2e6)


def _tell(sock: socket.socket, address: str, state: str) -> None:
    try:
        sock.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
    except OSError as error:
        logger.warning("cannot notify systemd of %s at %s: %s", state, address, error)
