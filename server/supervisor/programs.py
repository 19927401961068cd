"""What a service runs, on one machine and on Ray: the command, the environment and the settings of each process. `Starter` starts them.

The settings are a JSON file in memory: it has no name in a folder, only processes of this user can read it, and it disappears with the
process that made it.
Neither the command line nor the environment has a secret.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

from pydantic import SecretStr

from multiworld_serving.common.config.settings import ENV_PREFIX, Settings, to_json
from multiworld_serving.common.config.sources import LIBRARY_VARIABLES
from multiworld_serving.common.service.model_files import pipeline_source
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.common.settings.serve import FrontendSettings, ServeSettings
from multiworld_serving.common.settings.worker import WorkerSettings
from multiworld_serving.server.supervisor.child_process import ChildProcess
from multiworld_serving.server.supervisor.notify import NotifyListener
from multiworld_serving.server.supervisor.supervisor import Supervisor

PROGRAM = (sys.executable, "-P", "-m", "multiworld_serving.cli.main")
"""The command `multiworld`. -P keeps the working directory off `sys.path`, so that no module there is imported by mistake."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
SPIN_VARIABLE = "GOMP_SPINCOUNT"
SPINS = "20000"
"""OpenMP spin count of an idle thread: about 0.5 ms, longer than the pauses between the operations of a model. The default is
several milliseconds, during which another worker could use the core."""
_IMPORTS = tuple(f"multiworld_serving.{module}.main" for module in ("server.frontend", "server.leader", "workers"))
_STOP_MARGIN_S = 5.0
"""Seconds from the end of the drain timeout to SIGKILL."""
_BLOCKED_HEARTBEATS = 3
_BLOCKED_S = 5.0
"""A leader or frontend that gives no sign of life for this long is killed; at least `_BLOCKED_HEARTBEATS` heartbeat timeouts."""
_WORKER_STOP_S = 10.0
"""From SIGTERM to SIGKILL of a worker."""
_WORKER_BLOCKED_S = 15.0
"""After this time without a sign of life a worker is killed: so long that the leaders have lost it before, with the cause `stalled`."""

START_TIMEOUT_S = 900.0
"""Longest start of a model, or of a whole service that replaces another one: enough to export a large model."""

Role = Literal["leader", "frontend", "worker"]
Values = dict[str, object]
"""Settings by name."""
_OF_MODEL = ("timeout_s", "latency_objective_s", "queue_limit", "recovery_grace_s")
"""Settings of frontends that differ for each model."""


def leader_values(settings: ServeSettings, index: int) -> Values:
    """The settings of a leader, without its socket."""
    return {
        **_shared(settings, LeaderSettings),
        "name": f"leader-{index}",
        "report_capacity": settings.autoscale is not None,
    }


def frontend_values(settings: ServeSettings, index: int) -> Values:
    """The settings of a frontend, without its sockets and leaders."""
    return {**_shared(settings, FrontendSettings), "name": f"frontend-{index}"}


def model_values(models: Mapping[str, ServeSettings]) -> dict[str, Values]:
    """The setting `model_settings` of a frontend."""
    return {name: {each: getattr(settings, each) for each in _OF_MODEL} for name, settings in models.items()}


def worker_values(settings: ServeSettings) -> Values:
    """The settings of all workers, without name, slot, threads and leaders."""
    assert settings.local_token is not None, "the token must be set before workers start"
    shared = {name for name in WorkerSettings.model_fields if name in ServeSettings.model_fields}
    pipeline = pipeline_source(settings)
    # These are settings of other processes, or of the supervisor.
    others = {"advertise_host", "metrics_host", "metrics_port", "token", "token_file"}
    return {
        **{name: getattr(settings, name) for name in shared - others},
        "allow": None if pipeline is None else pipeline.absolute,
        "token": settings.local_token,
        "edge_token": SecretStr(settings.secrets[0].decode()) if settings.secrets else None,
    }


def timeouts_s(settings: ServeSettings, role: Role, worker_stop_s: float = _WORKER_STOP_S) -> tuple[float, float]:
    """Seconds from SIGTERM to SIGKILL of a process, and seconds without a sign of life after which it is killed."""
    if role == "worker":
        return worker_stop_s, _WORKER_BLOCKED_S
    blocked_s = max(_BLOCKED_S, _BLOCKED_HEARTBEATS * settings.heartbeat_timeout_s)
    return settings.drain_timeout_s + _STOP_MARGIN_S, blocked_s


def memory_file(stack: contextlib.ExitStack, name: str, text: str) -> str:
    """Path of a file in memory with this text; it disappears with this process, or when `stack` is closed."""
    file = stack.enter_context(os.fdopen(os.memfd_create(name), "w", encoding="utf-8"))
    file.write(text)
    file.flush()
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def write_file(path: str, text: str) -> None:
    """Replace the text of a file in memory. Too little memory for it must not stop a process."""
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _shared(settings: ServeSettings, cls: type[Settings]) -> Values:
    values = {name: getattr(settings, name) for name in cls.model_fields if hasattr(settings, name)}
    if values["token_file"] is not None:
        values["token"] = None  # read from the file
    return values


def environment_of(threads: int, notify: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process: inherited, without the settings of the service, which are in a file.

    Args:
        threads: compute threads; leaders and frontends compute nothing and need 1.
        notify: see `NotifyListener.environment`.
    """
    inherited = {
        name: text
        for name, text in os.environ.items()
        if not name.upper().startswith(ENV_PREFIX) or name.removeprefix(ENV_PREFIX) in LIBRARY_VARIABLES
    }
    inherited.pop("WATCHDOG_PID", None)  # of systemd, for this process
    return {SPIN_VARIABLE: SPINS, **inherited, **dict.fromkeys(THREAD_VARIABLES, str(threads)), **notify}


def import_programs(threads: int) -> bool:
    """Import what leaders, frontends and workers need, before they are forked. Takes seconds.

    Returns whether this process can fork them; see `can_fork`.
    """
    os.environ |= {SPIN_VARIABLE: os.environ.get(SPIN_VARIABLE, SPINS), **dict.fromkeys(THREAD_VARIABLES, str(threads))}
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # OpenBLAS starts its threads at the import; workers use those of torch
    # An import may check for CUDA. The check must not initialise CUDA: a process that did cannot fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for module in _IMPORTS:
        importlib.import_module(module)
    del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
    return can_fork()


def can_fork() -> bool:
    """Whether this process has one thread: others would not survive a fork. An import may have started one."""
    return len(os.listdir("/proc/self/task")) == 1


def compute_threads(settings: ServeSettings, workers: int) -> int:
    """Return the compute threads per local worker: as configured, or an equal share of the cores available to this process.

    Args:
        workers: number of workers of all models.
    """
    return settings.threads or max(1, len(os.sched_getaffinity(0)) // max(1, workers))


class Process(NamedTuple):
    """What a process is started with: its name, settings, inherited descriptors by setting, and compute threads."""

    name: str
    values: Values
    fds: Mapping[str, int]
    threads: int = 1


class Starter:
    """Makes supervisors, which start processes: as forks of this process, or as new programs if it cannot fork.

    Args:
        notify: receives the signs of life of all processes.
        program: runs a command line of `multiworld` in a fork of this process, which has imported the programs, and ends the fork.
            None: this process does not fork.

    Attributes:
        on_restart: called after each restart of a process.
    """

    def __init__(self, notify: NotifyListener, program: Callable[[Sequence[str]], object] | None = None) -> None:
        self.notify = notify
        self.on_restart: Callable[[], object] = lambda: None
        self._program = program

    def supervisor(
        self,
        role: Role,
        count: int,
        process: Callable[[int], Process],
        timeouts_s: tuple[float, float],
        prefix: str = "",
    ) -> Supervisor:
        """A supervisor of `count` processes.

        Args:
            process: what the process of a slot is started with.
            timeouts_s: see the function `timeouts_s`.
        """
        return Supervisor(
            lambda slot: self._start(role, process(slot)),
            count,
            kind=f"{prefix}{role}",
            stop_timeout_s=timeouts_s[0],
            notify=self.notify,
            blocked_timeout_s=timeouts_s[1],
            on_restart=lambda: self.on_restart(),  # noqa: PLW0108 - it may be set later
        )

    def _start(self, role: Role, process: Process) -> ChildProcess:
        """Start a process. Raises OSError."""
        with contextlib.ExitStack() as stack:
            own = int(memory_file(stack, "settings", to_json(process.values)).rpartition("/")[2])
            command = [role, "--name", process.name, "--settings-json", f"/dev/fd/{own}"]
            environment = environment_of(process.threads, self.notify.environment)
            fds = [*process.fds.values(), own]
            if self._program is not None and can_fork():
                title = " ".join(["multiworld", *command])
                return ChildProcess.fork(title, partial(self._program, command), environment, fds)
            return ChildProcess.spawn([*PROGRAM, *command], environment, fds)
