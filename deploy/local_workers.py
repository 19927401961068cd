"""The workers of `multiworld serve` on its own machine: how they are started, and with what."""

import os
import sys
from collections.abc import Callable

from config.settings import ENV_PREFIX
from config.sources import option
from deploy.supervisor import Supervisor, worker_name
from server.settings import ServeSettings
from workers.device import spread

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
SPIN_VARIABLE = "GOMP_SPINCOUNT"
SPINS = "20000"
"""How long a thread that has nothing to do keeps its core: about half a millisecond, which is longer than the pauses between the
operations of a model. By default it is some milliseconds, which another worker could use."""


def local_workers(
    settings: ServeSettings, leader: str, *, on_restart: Callable[[int], None] | None = None
) -> Supervisor:
    """The supervisor of the local workers, one for each replica of each stage.

    Args:
        settings: of the leader, the token included. Local workers take theirs from these and from nowhere else.
        leader: "HOST:PORT" at which this machine reaches the join port.
        on_restart: called with the slot of each worker that was started again.
    Raises:
        UserError: the device is not there.
    """
    threads = settings.worker_threads or fair_threads(settings.num_workers)
    devices = spread(settings.device, settings.num_workers)
    shared: dict[str, object] = {
        "leader": leader,
        "threads": threads,
        "heartbeat_interval_s": settings.heartbeat_interval_s,
        "heartbeat_timeout_s": settings.heartbeat_timeout_s,
        "join_timeout_s": settings.join_timeout_s,
        "log_level": settings.log_level,
        "log_format": settings.log_format,
    }
    if settings.otlp_endpoint is not None:
        shared["otlp_endpoint"] = settings.otlp_endpoint
    sharing = shared_cores(settings)
    # -P: a folder named `cli` in the working directory must not be taken for ours.
    program = [sys.executable, "-P", "-m", "cli.main"]
    base = [*program, "worker", "--exit-with-parent"]
    base += [part for name, value in shared.items() for part in (option(name), str(value))]
    return Supervisor(
        lambda slot: [*base, "--name", worker_name(slot), "--device", devices[slot], *sharing(slot)],
        settings.num_workers,
        environment=worker_environment(settings, threads),
        reserve=[*program, "reserve"],
        # Joining takes so long at the most, and the breaker keeps it away so long at the most.
        absent_timeout_s=2 * settings.join_timeout_s + settings.breaker_max_s,
        on_restart=on_restart,
    )


def shared_cores(settings: ServeSettings) -> Callable[[int], list[str]]:
    """Options of the worker in each slot, by which those of one machine share its cores. None where threads were asked for."""
    seats = settings.num_workers
    if settings.worker_threads or seats == 1 or settings.device != "cpu":
        return lambda slot: []
    # It lives as long as this process, and nobody has to remove it.
    file = f"/proc/{os.getpid()}/fd/{os.memfd_create('cores')}"
    return lambda slot: ["--cores-file", file, "--cores-seat", str(slot), "--cores-seats", str(seats)]


def worker_environment(settings: ServeSettings, threads: int) -> dict[str, str]:
    """This process's environment without the leader's own settings, but with the token, which no argument may show."""
    assert settings.token is not None, "the token is settled before workers start"
    inherited = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
    return {
        **inherited,
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        SPIN_VARIABLE: os.environ.get(SPIN_VARIABLE, SPINS),
        ENV_PREFIX + "TOKEN": settings.token.get_secret_value(),
    }


def fair_threads(num_workers: int) -> int:
    """Threads for each of so many workers, so that together they use the cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // num_workers)
