"""The service that is hurt: where it answers, and which processes its workers are."""

import re
import socket
from pathlib import Path
from typing import Protocol

import httpx

from chaos.processes import parent
from config import NOTHING, Access, UserError

_STARTED = re.compile(r"worker slot=(\d+) pid=(\d+) started")


class Target(Protocol):
    """A running service on this machine. `deploy.service.LocalService` is one."""

    @property
    def url(self) -> str:
        """Where its HTTP API answers."""

    @property
    def way_in(self) -> Access:
        """What it wants to be shown."""

    @property
    def pid(self) -> int | None:
        """The leader's process; None when that is not known."""

    def worker_pids(self) -> dict[str, int]:
        """The processes of its workers as they are now, by the names by which they joined."""


class RunningService:
    """A service that somebody else has started. Its workers' processes are found by their names HOSTNAME-PID, or in its log.

    Args:
        log: file that the service's standard error goes to, as text or JSON; needed for local workers, which are called `local-N`.
    """

    def __init__(self, url: str, *, pid: int | None = None, log: Path | None = None, way_in: Access = NOTHING) -> None:
        self.url = url.rstrip("/")
        self.way_in = way_in
        self._pid = pid
        self._log = log

    @property
    def pid(self) -> int | None:
        """As given, or else what started the local workers."""
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
        """See `Target.worker_pids`. Raises UserError when the log cannot be read."""
        return pids_in_names(self._names()) | self._pids_in_log()

    def _names(self) -> list[str]:
        status = httpx.get(f"{self.url}/status", timeout=30.0, **self.way_in.options).json()
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
    """The processes of workers that are called HOSTNAME-PID and run on this machine."""
    prefix = f"{socket.gethostname()}-"
    return {
        name: int(name.removeprefix(prefix))
        for name in names
        if name.startswith(prefix) and name.removeprefix(prefix).isdigit()
    }
