"""What a service runs, on one machine and on Ray: the command, the environment and the settings of each process.

The settings are a JSON file in memory: it has no name in a folder, only processes of this user can read it, and it disappears with the
process that made it.
Neither the command line nor the environment has a secret.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Literal

from pydantic import SecretStr

from multiworld_serving.common.config.settings import ENV_PREFIX, Settings, to_json
from multiworld_serving.server.leader_settings import LeaderSettings
from multiworld_serving.server.settings import FrontendSettings, ServeSettings
from multiworld_serving.workers.settings import WorkerSettings

PROGRAM = (sys.executable, "-P", "-m", "multiworld_serving.cli.main")
"""The command `multiworld`. -P keeps the working directory off `sys.path`, so that no module there is imported by mistake."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
SPIN_VARIABLE = "GOMP_SPINCOUNT"
SPINS = "20000"
"""OpenMP spin count of an idle thread: about 0.5 ms, longer than the pauses between the operations of a model. The default is
several milliseconds, during which another worker could use the core."""
_IMPORTS = tuple(f"multiworld_serving.{module}.main" for module in ("server.frontends", "server", "workers"))
_STOP_MARGIN_S = 5.0
"""Seconds from the end of the drain timeout to SIGKILL."""
_BLOCKED_HEARTBEATS = 3
_BLOCKED_S = 5.0
"""A leader or frontend that gives no sign of life for this long is killed; at least `_BLOCKED_HEARTBEATS` heartbeat timeouts."""
WORKER_BLOCKED_S = 15.0
"""The same for a worker: so long that the leaders have lost it before, with the cause `stalled`."""

Role = Literal["leader", "frontend", "worker"]
Values = dict[str, object]
"""Settings by name."""


def leader_values(settings: ServeSettings, index: int) -> Values:
    """The settings of a leader, without its socket."""
    return {
        **_shared(settings, LeaderSettings),
        "name": f"leader-{index}",
        "report_capacity": settings.autoscale is not None,
        "metrics_port": None,
        "metrics_host": None,
    }


def frontend_values(settings: ServeSettings, index: int) -> Values:
    """The settings of a frontend, without its sockets and leaders."""
    return {**_shared(settings, FrontendSettings), "name": f"frontend-{index}"}


def worker_values(settings: ServeSettings) -> Values:
    """The settings of all workers, without name, device, threads and leaders."""
    assert settings.local_token is not None, "the token must be set before workers start"
    shared = {name for name in WorkerSettings.model_fields if name in ServeSettings.model_fields}
    # These are settings of other processes, or of the supervisor.
    others = {"advertise_host", "device", "metrics_host", "metrics_port", "token", "token_file"}
    return {
        **{name: getattr(settings, name) for name in shared - others},
        "token": settings.local_token,
        "edge_token": SecretStr(settings.secrets[0].decode()) if settings.secrets else None,
    }


def stop_timeout_s(settings: ServeSettings) -> float:
    """Seconds from SIGTERM to SIGKILL of a leader or frontend."""
    return settings.drain_timeout_s + _STOP_MARGIN_S


def blocked_timeout_s(settings: ServeSettings) -> float:
    """Seconds without a sign of life after which a leader or frontend is killed."""
    return max(_BLOCKED_S, _BLOCKED_HEARTBEATS * settings.heartbeat_timeout_s)


def settings_file(stack: contextlib.ExitStack, values: Values) -> str:
    """Path of a JSON file in memory with the settings of a program, secrets included. `stack` removes it."""
    return memory_file(stack, "settings", to_json(values))


def memory_file(stack: contextlib.ExitStack, name: str, text: str) -> str:
    """Path of a file in memory with this text; it disappears with this process, or when `stack` is closed."""
    file = stack.enter_context(os.fdopen(os.memfd_create(name), "w", encoding="utf-8"))
    file.write(text)
    file.flush()
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _shared(settings: ServeSettings, cls: type[Settings]) -> Values:
    values = {name: getattr(settings, name) for name in cls.model_fields if hasattr(settings, name)}
    if values["token_file"] is not None:
        values["token"] = None  # read from the file
    return values


def environment_of(threads: int, notify: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process: inherited, without settings of the service; it gets these in a file.

    Args:
        threads: compute threads; leaders and frontends compute nothing and need 1.
        notify: see `NotifyListener.environment`.
    """
    inherited = {name: text for name, text in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
    inherited.pop("WATCHDOG_PID", None)  # of systemd, for this process
    return {SPIN_VARIABLE: SPINS, **inherited, **dict.fromkeys(THREAD_VARIABLES, str(threads)), **notify}


def import_programs(threads: int) -> bool:
    """Import what leaders, frontends and workers need, before they are forked. Takes seconds.

    Returns whether this process can fork them: not if an import has started a thread.
    """
    os.environ |= {SPIN_VARIABLE: os.environ.get(SPIN_VARIABLE, SPINS), **dict.fromkeys(THREAD_VARIABLES, str(threads))}
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # OpenBLAS starts its threads at the import; workers use those of torch
    # An import may check for CUDA. The check must not initialise CUDA: a process that did cannot fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for module in _IMPORTS:
        importlib.import_module(module)
    del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
    return len(os.listdir("/proc/self/task")) == 1


def compute_threads(settings: ServeSettings, workers: int) -> int:
    """Return the compute threads per local worker: as configured, or an equal share of the cores available to this process.

    Args:
        workers: number of workers of all models.
    """
    return settings.threads or max(1, len(os.sched_getaffinity(0)) // max(1, workers))
