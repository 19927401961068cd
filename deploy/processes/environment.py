"""Programs and environment variables of the child processes. Imports no torch, so that the fork server starts early."""

import os
import sys
from collections.abc import Mapping

from multiworld_serving.common.config.settings import ENV_PREFIX
from multiworld_serving.deploy.processes.fork_server import ForkServer
from multiworld_serving.server.settings import ServeSettings

PROGRAM = (sys.executable, "-P", "-m", "multiworld_serving.cli.main")
"""The command `multiworld`. -P keeps the working directory off `sys.path`, so that no module there is imported by mistake."""
FORK_SERVER_PROGRAM = (sys.executable, "-P", "-m", "multiworld_serving.cli.fork_server")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
SPIN_VARIABLE = "GOMP_SPINCOUNT"
SPINS = "20000"
"""OpenMP spin count of an idle thread: about 0.5 ms, longer than the pauses between the operations of a model. The default is
several milliseconds, during which another worker could use the core."""


def child_fork_server(settings: ServeSettings, notify: Mapping[str, str]) -> ForkServer:
    """Return the fork server of all child processes.

    Args:
        notify: see `NotifyListener.environment`.
    """
    return ForkServer(FORK_SERVER_PROGRAM, worker_environment(compute_threads(settings), notify))


def worker_environment(threads: int, notify: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of workers: inherited, without settings of the service; they get these in a file."""
    return {
        **_inherited(),
        **notify,
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        SPIN_VARIABLE: os.environ.get(SPIN_VARIABLE, SPINS),
    }


def program_environment(notify: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of leaders and frontends, which compute nothing."""
    return {**_inherited(), **notify, **dict.fromkeys(THREAD_VARIABLES, "1")}


def _inherited() -> dict[str, str]:
    own = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}  # of systemd, for this process
    return {
        name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX) and name not in own
    }


def compute_threads(settings: ServeSettings) -> int:
    """Return the compute threads per local worker: as configured, or an equal share of the cores."""
    return settings.threads or fair_threads(settings.num_workers)


def fair_threads(num_workers: int) -> int:
    """Return the threads per worker so that all workers together use the cores available to this process."""
    return max(1, len(os.sched_getaffinity(0)) // num_workers)
