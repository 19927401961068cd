"""The service under test: its URL and its processes."""

import contextlib
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx

from multiworld_serving.common.config import NO_CREDENTIALS, ClientCredentials
from multiworld_serving.testing.chaos.system.processes import parent

_PARTS = ("frontends", "leaders")


class SystemUnderTest(Protocol):
    """A running service on this machine, for example `testing.local_service.LocalService`."""

    @property
    def url(self) -> str:
        """URL of its HTTP API."""

    @property
    def credentials(self) -> ClientCredentials:
        """Credentials of requests to it."""

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor, `multiworld serve`; None if unknown."""

    def worker_pids(self) -> dict[str, int]:
        """Process ids of its current workers, by worker name."""

    def child_pids(self, kind: str) -> dict[int, int]:
        """Process ids of the current leaders ("leader") or frontends ("frontend") of the supervisor, by slot; empty if unknown."""


class RunningService:
    """A service that was started elsewhere. Its processes are those of its status that run on this machine."""

    def __init__(self, url: str, *, credentials: ClientCredentials = NO_CREDENTIALS) -> None:
        self.url = url.rstrip("/")
        self.credentials = credentials

    @property
    def pid(self) -> int | None:
        """The parent process of a frontend or leader if it is `multiworld serve`."""
        status = self._status()
        parents = (_supervisor(pid) for kind in _PARTS for pid in _named_pids(status[kind]).values())
        return next((pid for pid in parents if pid is not None), None)

    def worker_pids(self) -> dict[str, int]:
        """See `SystemUnderTest.worker_pids`. Raises httpx.HTTPError."""
        status = self._status()
        replicas = [replica for stage in status["stages"] for replica in stage["replicas"]]
        return _named_pids([{**each, "name": each["worker"]} for each in (*replicas, *status["spares"])])

    def child_pids(self, kind: str) -> dict[int, int]:
        """See `SystemUnderTest.child_pids`: "leader" or "frontend". Raises httpx.HTTPError."""
        named = _named_pids(self._status()[f"{kind}s"])
        slots = {
            re.fullmatch(rf"{kind}-(\d+)", name): pid for name, pid in named.items() if _supervisor(pid) is not None
        }
        return {int(match[1]): pid for match, pid in slots.items() if match is not None}

    def _status(self) -> dict[str, Any]:
        """GET /status, once more if the frontend that had the connection was lost."""
        with contextlib.suppress(httpx.TransportError):
            return self._get_status()
        return self._get_status()

    def _get_status(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/status", timeout=30.0, **self.credentials.options).json()
        return found


def _named_pids(parts: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Process ids by name, of the parts of a status that run on this machine."""
    here = socket.gethostname()
    return {str(part["name"]): int(part["pid"]) for part in parts if part["pid"] is not None and part["host"] == here}


def _supervisor(pid: int) -> int | None:
    """The parent process if it is `multiworld serve`."""
    try:
        found = parent(pid)
        arguments = Path(f"/proc/{found}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return None
    return found if b"serve" in arguments else None
