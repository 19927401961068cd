"""Controls a service on this machine, and can start it as a child process. Benchmarks, fault injection and tests use it."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import httpx

from multiworld_serving.common.config.client_options import NO_CREDENTIALS
from multiworld_serving.common.config.sources import option
from multiworld_serving.server.supervisor.programs import PROGRAM
from multiworld_serving.testing.chaos.system.processes import parent

_STOP_S = 120.0
_PARTS = ("frontends", "leaders")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One JSON log line of the leader or a worker.

    Attributes:
        at_s: time of receipt (`time.time()`).
    """

    at_s: float
    fields: dict[str, Any]

    @property
    def message(self) -> str:
        return str(self.fields.get("message", ""))

    def __getitem__(self, field: str) -> Any:
        return self.fields.get(field)


class ServiceFailedError(Exception):
    """The service ended or did not start in time; the message contains the end of its log."""


def start_program(arguments: Sequence[str]) -> "subprocess.Popen[str]":
    """Start `multiworld` with these arguments, without settings from the environment.

    It has a process group of its own: Ctrl-C and `timeout` signal the group of the caller, which ends the load before the service.
    """
    return subprocess.Popen(  # noqa: S603 - program and arguments are ours
        [*PROGRAM, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("MULTIWORLD_")},
        process_group=0,
    )


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


class LocalService(RunningService):
    """`multiworld serve` with local workers on free ports of 127.0.0.1, as `with LocalService(stages=2) as service`.

    Args:
        credentials: credentials of requests, if its settings require them.
        wait_until_ready: wait for all replicas on entering, not only until it listens.
        settings: of `multiworld serve`, by name: `model="resnet18"`, `weights="random:0"`, …

    Attributes:
        start_program: starts the process. Tests fork it instead.
    """

    start_program: ClassVar[Callable[[Sequence[str]], Any]] = staticmethod(start_program)

    def __init__(
        self,
        *,
        start_timeout_s: float = 180.0,
        wait_until_ready: bool = True,
        credentials: Mapping[str, Any] = NO_CREDENTIALS,
        **settings: object,
    ) -> None:
        super().__init__("", credentials=credentials)
        defaults = {"http_port": 0, "join_port": 0, "admin_port": 0, "log_format": "json"}
        chosen = defaults | settings
        self._arguments = [part for name, value in chosen.items() for part in _option(name, value)]
        self._start_timeout_s = start_timeout_s
        self._wait_until_ready = wait_until_ready
        self._process: subprocess.Popen[str] | None = None
        self._lines: list[LogLine] = []
        self._changed = threading.Condition()
        self._reader: threading.Thread | None = None
        self._ended = False
        self.metrics_url = ""
        self.join_address = ""
        self.grpc_address: str | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def lines(self) -> list[LogLine]:
        """All log lines so far."""
        with self._changed:
            return list(self._lines)

    def __enter__(self) -> Self:
        self._process = LocalService.start_program(["serve", *self._arguments])
        self._reader = threading.Thread(target=self._read, name="service-log", daemon=True)
        self._reader.start()
        try:
            listening = self.wait_for(lambda line: line.message.startswith("listening "), self._start_timeout_s)
            self.url, self.metrics_url, self.join_address = listening["http"], listening["metrics"], listening["join"]
            self.grpc_address = listening["grpc"]
            if self._wait_until_ready:
                self.wait_until_complete(self._start_timeout_s)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, signum: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait; sends SIGKILL after two minutes. Returns the exit status."""
        process = self._process
        assert process is not None
        if process.poll() is None:
            process.send_signal(signum)
        try:
            status = process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        if self._reader is not None:
            self._reader.join(5.0)
        return status

    def wait_for(self, wanted: Callable[[LogLine], bool], timeout_s: float, *, after: int = 0) -> LogLine:
        """Wait for the first log line from index `after` on that satisfies `wanted`. Raises ServiceFailedError."""
        deadline_s = time.monotonic() + timeout_s
        at = after
        with self._changed:
            while True:
                while at < len(self._lines):
                    if wanted(self._lines[at]):
                        return self._lines[at]
                    at += 1
                if self._ended or not self._changed.wait(max(0.0, deadline_s - time.monotonic())):
                    why = "ended" if self._ended else f"did not log the expected line within {timeout_s:g} s"
                    raise ServiceFailedError(f"the service {why}; its log ends:\n{self._log_tail()}")

    def wait_until_complete(self, timeout_s: float) -> dict[str, Any]:
        """Wait until every slot of every stage is ready; returns the status. Raises ServiceFailedError."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and self._process is not None and self._process.poll() is None:
            with contextlib.suppress(httpx.TransportError):  # the service may have ended; the log says why
                status = self.status()
                # There are none while the frontend has no leader.
                if {replica["state"] for stage in status["stages"] for replica in stage["replicas"]} == {"ready"}:
                    return status
            time.sleep(0.05)
        raise ServiceFailedError("not every replica became ready:\n" + self._log_tail())

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over all series with these labels; 0 if there are none."""
        text = httpx.get(self.metrics_url, timeout=30.0, **self.credentials).text
        return metric_sum(text, name, **labels)

    def worker_pids(self) -> dict[str, int]:
        """Return the latest process id of each local worker by name."""
        return {f"local-{slot}": pid for slot, pid in self.child_pids("worker").items()}

    def child_pids(self, kind: str) -> dict[int, int]:
        """Return the latest process ids of the children of one kind ("leader", "frontend" or "worker") by slot."""
        started = (
            line for line in self.lines if line.message.startswith(f"{kind} slot=") and "started" in line.message
        )
        return {int(line["slot"]): int(line["pid"]) for line in started}

    def worker_at(self, stage: int, slot: int) -> str | None:
        """Return the name of the ready worker in this slot; None if it is not ready."""
        replica = self.status()["stages"][stage]["replicas"][slot]
        return str(replica["worker"]) if replica["state"] == "ready" else None

    def _log_tail(self) -> str:
        return "\n".join(line.message for line in self._lines[-15:])

    def _read(self) -> None:
        """Read the log until leader and workers have closed their standard error."""
        assert self._process is not None
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for text in stream:
                self._add(text)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _add(self, text: str) -> None:
        try:
            fields = json.loads(text)
        except ValueError:
            fields = {"message": text.rstrip()}
        with self._changed:
            self._lines.append(LogLine(time.time(), fields))
            self._changed.notify_all()


def _option(name: str, value: object) -> Sequence[str]:
    if isinstance(value, bool):
        return (option(name),) if value else ()
    return (option(name), str(value))


def metric_sum(text: str, name: str, **labels: str) -> float:
    """Return the sum of a metric in the Prometheus text format over all series with these labels; 0 if there are none."""
    pattern = re.compile(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)", re.MULTILINE)
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(value) for series, value in pattern.findall(text) if all(each in series for each in wanted))


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
