"""The local worker processes of `multiworld serve`: command lines and environment."""

import os
from collections.abc import Callable

from multiworld_serving.common.config.sources import option
from multiworld_serving.deploy.processes.environment import PROGRAM, compute_threads, worker_environment
from multiworld_serving.deploy.processes.fork_server import ForkServer
from multiworld_serving.deploy.processes.supervisor import Supervisor, worker_name
from multiworld_serving.server.settings import ServeSettings
from multiworld_serving.workers.compute.device import assign_devices


def local_workers(
    settings: ServeSettings,
    leader: str,
    *,
    fork_server: ForkServer | None = None,
    on_restart: Callable[[int], None] | None = None,
) -> Supervisor:
    """Return a supervisor of the local workers, one per replica of each stage; it starts them when entered.

    Args:
        settings: of the leader, including the token. Local workers get their settings from these only.
        leader: "HOST:PORT" of the join port, as seen from this machine.
        fork_server: see `worker_fork_server`; None starts each worker as a new program.
        on_restart: called with the slot of each worker that was restarted.
    Raises:
        UserError: the device does not exist.
    """
    devices = assign_devices(settings.device, settings.num_workers)
    shared: dict[str, object] = {
        "leader": leader,
        "threads": compute_threads(settings),
        "heartbeat_interval_s": settings.heartbeat_interval_s,
        "heartbeat_timeout_s": settings.heartbeat_timeout_s,
        "loop_stall_timeout_s": settings.loop_stall_timeout_s,
        "join_timeout_s": settings.join_timeout_s,
        "log_level": settings.log_level,
        "log_format": settings.log_format,
    }
    if settings.otlp_endpoint is not None:
        shared["otlp_endpoint"] = settings.otlp_endpoint
    sharing = shared_cores(settings)
    rest = [part for name, value in shared.items() for part in (option(name), str(value))]
    return Supervisor(
        # The name comes first, because `ps` may truncate the command line.
        lambda slot: [
            *(*PROGRAM, "worker", "--name", worker_name(slot), "--device", devices[slot], "--exit-with-parent"),
            *(*rest, *sharing(slot)),
        ],
        settings.num_workers,
        environment=worker_environment(settings),
        fork_server=fork_server,
        # The maximum time of joining plus the maximum time that the circuit breaker refuses a worker.
        absent_timeout_s=2 * settings.join_timeout_s + settings.breaker_max_s,
        on_restart=on_restart,
    )


def shared_cores(settings: ServeSettings) -> Callable[[int], list[str]]:
    """Return a function from slot to the options with which the workers share the cores; no options if threads are configured."""
    seats = settings.num_workers
    if settings.worker_threads or seats == 1 or settings.device != "cpu":
        return lambda slot: []
    # A memfd: it disappears with this process.
    file = f"/proc/{os.getpid()}/fd/{os.memfd_create('cores')}"
    return lambda slot: ["--cores-file", file, "--cores-index", str(slot), "--cores-workers", str(seats)]
