"""The service under test: its URL and its processes."""

import contextlib
import re
import socket
from pathlib import Path
from typing import Protocol

import httpx

from multiworld_serving.common.config import NO_CREDENTIALS, ClientCredentials, UserError
from multiworld_serving.testing.chaos.system.processes import parent

_STARTED = re.compile(r"(leader|frontend|worker) slot=(\d+) pid=(\d+) started")


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
    """A service that was started elsewhere. Its processes are found in the log, and external workers by their names HOSTNAME-PID.

    Args:
        log: file with the standard error of the service, as text or JSON; needed for local workers, leaders and frontends.
    """

    def __init__(
        self,
        url: str,
        *,
        pid: int | None = None,
        log: Path | None = None,
        credentials: ClientCredentials = NO_CREDENTIALS,
    ) -> None:
        self.url = url.rstrip("/")
        self.credentials = credentials
        self._pid = pid
        self._log = log

    @property
    def pid(self) -> int | None:
        """As given, otherwise the parent process of the frontends."""
        if self._pid is not None:
            return self._pid
        for pid in self.child_pids("frontend").values():
            with contextlib.suppress(OSError):
                return parent(pid)
        return None

    def worker_pids(self) -> dict[str, int]:
        """See `SystemUnderTest.worker_pids`. Raises UserError if the log cannot be read."""
        local = {f"local-{slot}": pid for slot, pid in self.child_pids("worker").items()}
        return pids_in_names(self._names()) | local

    def _names(self) -> list[str]:
        status = httpx.get(f"{self.url}/status", timeout=30.0, **self.credentials.options).json()
        return [str(replica["worker"]) for stage in status["stages"] for replica in stage["replicas"]]

    def child_pids(self, kind: str) -> dict[int, int]:
        """See `SystemUnderTest.child_pids`; also "worker". Raises UserError if the log cannot be read."""
        if self._log is None:
            return {}
        try:
            text = self._log.read_text(errors="replace")
        except OSError as error:
            raise UserError(f"--log {self._log}: cannot be read: {error.strerror}") from error
        return {int(slot): int(pid) for each, slot, pid in _STARTED.findall(text) if each == kind}


def pids_in_names(names: list[str]) -> dict[str, int]:
    """Return the process ids of workers named HOSTNAME-PID on this machine."""
    prefix = f"{socket.gethostname()}-"
    return {
        name: int(name.removeprefix(prefix))
        for name in names
        if name.startswith(prefix) and name.removeprefix(prefix).isdigit()
    }
