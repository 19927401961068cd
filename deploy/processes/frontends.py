"""The frontend processes of `multiworld serve`: command lines and environment."""

from collections.abc import Callable

from multiworld_serving.deploy.processes.environment import PROGRAM, frontend_environment
from multiworld_serving.deploy.processes.fork_server import ForkServer
from multiworld_serving.deploy.processes.supervisor import Supervisor
from multiworld_serving.server.settings import ServeSettings

_ABSENT_S = 60.0
"""Timeout from the start of a frontend until it connects to the leader; its imports take seconds."""


def frontends(
    settings: ServeSettings,
    leader: str,
    *,
    fork_server: ForkServer | None = None,
    on_restart: Callable[[int], None] | None = None,
) -> Supervisor:
    """Return a supervisor of the frontends; it starts them when entered.

    Args:
        leader: path of the Unix socket of the leader.
        fork_server: see `worker_fork_server`; None starts each frontend as a new program.
        on_restart: called with the slot of each frontend that was restarted.
    """
    rest = ["--leader", leader, "--log-level", settings.log_level, "--log-format", settings.log_format]
    return Supervisor(
        lambda slot: [*PROGRAM, "frontend", "--name", frontend_name(slot), *rest],
        settings.frontends,
        kind="frontend",
        name=frontend_name,
        environment=frontend_environment(),
        fork_server=fork_server,
        absent_timeout_s=_ABSENT_S,
        on_restart=on_restart,
    )


def frontend_name(slot: int) -> str:
    """Return the name with which the frontend of this slot connects to the leader."""
    return f"frontend-{slot}"
