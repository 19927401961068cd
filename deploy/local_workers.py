"""The workers of `multiworld serve` on its own machine: how they are started, and with what."""

import os
from collections.abc import Callable

from config.sources import option
from deploy.fork_server import ForkServer
from deploy.supervisor import Supervisor, worker_name
from deploy.worker_forks import PROGRAM, compute_threads, worker_environment
from server.settings import ServeSettings
from workers.device import spread


def local_workers(
    settings: ServeSettings,
    leader: str,
    *,
    forks: ForkServer | None = None,
    on_restart: Callable[[int], None] | None = None,
) -> Supervisor:
    """The supervisor of the local workers, one for each replica of each stage.

    Args:
        settings: of the leader, the token included. Local workers take theirs from these and from nowhere else.
        leader: "HOST:PORT" at which this machine reaches the join port.
        forks: see `worker_forks`; without it, each worker imports for itself.
        on_restart: called with the slot of each worker that was started again.
    Raises:
        UserError: the device is not there.
    """
    devices = spread(settings.device, settings.num_workers)
    shared: dict[str, object] = {
        "leader": leader,
        "threads": compute_threads(settings),
        "heartbeat_interval_s": settings.heartbeat_interval_s,
        "heartbeat_timeout_s": settings.heartbeat_timeout_s,
        "join_timeout_s": settings.join_timeout_s,
        "log_level": settings.log_level,
        "log_format": settings.log_format,
    }
    if settings.otlp_endpoint is not None:
        shared["otlp_endpoint"] = settings.otlp_endpoint
    sharing = shared_cores(settings)
    rest = [part for name, value in shared.items() for part in (option(name), str(value))]
    return Supervisor(
        # The name comes first: `ps` may have no room for all.
        lambda slot: [
            *(*PROGRAM, "worker", "--name", worker_name(slot), "--device", devices[slot], "--exit-with-parent"),
            *(*rest, *sharing(slot)),
        ],
        settings.num_workers,
        environment=worker_environment(settings),
        forks=forks,
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
