"""The frontends of `multiworld serve`: how they are started, and with what."""

from collections.abc import Callable

from deploy.fork_server import ForkServer
from deploy.supervisor import Supervisor
from deploy.worker_forks import PROGRAM, frontend_environment
from server.settings import ServeSettings

_ABSENT_S = 60.0
"""Longest time from a frontend's start to its first word; importing takes it seconds."""


def frontends(
    settings: ServeSettings,
    leader: str,
    *,
    forks: ForkServer | None = None,
    on_restart: Callable[[int], None] | None = None,
) -> Supervisor:
    """The supervisor of the frontends.

    Args:
        leader: path of the Unix socket at which they find it.
        forks: see `worker_forks`; without it, each frontend imports for itself.
        on_restart: called with the slot of each that was started again.
    """
    rest = ["--leader", leader, "--log-level", settings.log_level, "--log-format", settings.log_format]
    return Supervisor(
        lambda slot: [*PROGRAM, "frontend", "--name", frontend_name(slot), *rest],
        settings.frontends,
        kind="frontend",
        name=frontend_name,
        environment=frontend_environment(),
        forks=forks,
        absent_timeout_s=_ABSENT_S,
        on_restart=on_restart,
    )


def frontend_name(slot: int) -> str:
    """The name by which the frontend of this slot comes to the leader."""
    return f"frontend-{slot}"
