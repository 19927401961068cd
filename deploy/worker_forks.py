"""What the local workers are forked from, and their environment. It imports no torch, so that it can be started before that."""

import os
import sys

from config.settings import ENV_PREFIX
from deploy.fork_server import ForkServer
from server.settings import ServeSettings

PROGRAM = (sys.executable, "-P", "-m", "cli.main")
"""-P: a folder named `cli` in the working directory must not be taken for ours."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
SPIN_VARIABLE = "GOMP_SPINCOUNT"
SPINS = "20000"
"""How long a thread that has nothing to do keeps its core: about half a millisecond, which is longer than the pauses between the
operations of a model. By default it is some milliseconds, which another worker could use."""


def worker_forks(settings: ServeSettings) -> ForkServer:
    """What the local workers are forked from. It does not wait for this process to import torch: entered early, it gains that time."""
    return ForkServer([*PROGRAM, "fork-server"], worker_environment(settings))


def worker_environment(settings: ServeSettings) -> dict[str, str]:
    """This process's environment without the leader's own settings, but with the token, which no argument may show."""
    assert settings.token is not None, "the token is settled before workers start"
    return {
        **_inherited(),
        **dict.fromkeys(THREAD_VARIABLES, str(compute_threads(settings))),
        SPIN_VARIABLE: os.environ.get(SPIN_VARIABLE, SPINS),
        ENV_PREFIX + "TOKEN": settings.token.get_secret_value(),
    }


def frontend_environment() -> dict[str, str]:
    """This process's environment without the leader's own settings. Frontends compute nothing."""
    return {**_inherited(), **dict.fromkeys(THREAD_VARIABLES, "1")}


def _inherited() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}


def compute_threads(settings: ServeSettings) -> int:
    """Threads of each local worker: as was asked for, or its share of the cores."""
    return settings.worker_threads or fair_threads(settings.num_workers)


def fair_threads(num_workers: int) -> int:
    """Threads for each of so many workers, so that together they use the cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // num_workers)
