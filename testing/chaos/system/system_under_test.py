"""The service under test: its URL, and the processes of its workers."""

import re
import socket
from pathlib import Path
from typing import Protocol

import httpx

from multiworld_serving.common.config import NO_CREDENTIALS, ClientCredentials, UserError
from multiworld_serving.testing.chaos.system.processes import parent

_STARTED = re.compile(r"worker slot=(\d+) pid=(\d+) started")


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
        """Process id of the leader; None if unknown."""

    def worker_pids(self) -> dict[str, int]:
        """Process ids of its current workers, by worker name."""


class RunningService:
    """A service that was started elsewhere. Worker processes are found by their names HOSTNAME-PID, or in the log.

    Args:
        log: file with the standard error of the service, as text or JSON; needed for local workers, named `local-N`.
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
        """As given, otherwise the parent process of the local workers."""
        if self._pid is None:
            for name, pid in self.worker_pids().items():
                if name.startswith("local-"):
                    try:
                        self._pid = parent(pid)
                    except OSError:
                        continue
                    break
        return self._pid

    def worker_pids(self) -> dict[str, int]:
        """See `SystemUnderTest.worker_pids`. Raises UserError if the log cannot be read."""
        return pids_in_names(self._names()) | self._pids_in_log()

    def _names(self) -> list[str]:
        status = httpx.get(f"{self.url}/status", timeout=30.0, **self.credentials.options).json()
        return [str(replica["worker"]) for stage in status["stages"] for replica in stage["replicas"]]

    def _pids_in_log(self) -> dict[str, int]:
        if self._log is None:
            return {}
        try:
            text = self._log.read_text(errors="replace")
        except OSError as error:
            raise UserError(f"--log {self._log}: cannot be read: {error.strerror}") from error
        return {f"local-{slot}": int(pid) for slot, pid in _STARTED.findall(text)}


def pids_in_names(names: list[str]) -> dict[str, int]:
    """Return the process ids of workers named HOSTNAME-PID on this machine."""
    prefix = f"{socket.gethostname()}-"
    return {
        name: int(name.removeprefix(prefix))
        for name in names
        if name.startswith(prefix) and name.removeprefix(prefix).isdigit()
    }
