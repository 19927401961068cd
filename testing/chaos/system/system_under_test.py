"""The service under test: its URL and its processes."""

import contextlib
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from multiworld_serving.common.config.client_options import NO_CREDENTIALS
from multiworld_serving.testing.chaos.system.processes import parent

_PARTS = ("frontends", "leaders")


class RunningService:
    """A service that was started elsewhere. Its processes are those of its status that run on this machine.

    Args:
        credentials: keyword arguments of httpx, see `client_options`.
        model: which model is tested, if it serves several.
    """

    def __init__(self, url: str, *, credentials: Mapping[str, Any] = NO_CREDENTIALS, model: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.credentials = credentials
        self.model = model

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor, `multiworld serve`, if it is the parent of a frontend or leader."""
        status = self._status_again()
        parents = (_supervisor(pid) for kind in _PARTS for pid in _named_pids(status[kind]).values())
        return next((pid for pid in parents if pid is not None), None)

    def worker_pids(self) -> dict[str, int]:
        """Process ids of its workers, by worker name. Raises httpx.HTTPError."""
        status = self._status_again()
        replicas = [replica for stage in status["stages"] for replica in stage["replicas"]]
        return _named_pids([{**each, "name": each["worker"]} for each in (*replicas, *status["spares"])])

    def child_pids(self, kind: str) -> dict[int, int]:
        """Process ids of the leaders ("leader") or frontends ("frontend") of its supervisor, by slot. Raises httpx.HTTPError."""
        named = _named_pids(self._status_again()[f"{kind}s"])
        slots = {
            re.fullmatch(rf"(?:.+-)?{kind}-(\d+)", name): pid
            for name, pid in named.items()
            if _supervisor(pid) is not None
        }
        return {int(match[1]): pid for match, pid in slots.items() if match is not None}

    def status(self) -> dict[str, Any]:
        """Return the document of GET /status."""
        params = {} if self.model is None else {"model": self.model}
        answer = httpx.get(f"{self.url}/status", params=params, timeout=30.0, **self.credentials)
        found: dict[str, Any] = answer.json()
        return found

    def _status_again(self) -> dict[str, Any]:
        """`status`, once more if the frontend that had the connection was lost."""
        with contextlib.suppress(httpx.TransportError):
            return self.status()
        return self.status()


def _named_pids(parts: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Process ids by name, of the parts of a status that run on this machine."""
    here = socket.gethostname()
    return {str(part["name"]): int(part["pid"]) for part in parts if part["pid"] is not None and part["host"] == here}


def _supervisor(pid: int) -> int | None:
    """The parent process if it is `multiworld serve`, as its arguments or its title say."""
    try:
        found = parent(pid)
        arguments = Path(f"/proc/{found}/cmdline").read_bytes().replace(b"\0", b" ").split()
    except OSError:  # it has ended
        return None
    return found if b"serve" in arguments else None
