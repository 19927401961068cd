"""What starts, stops and watches the processes of a service.

There are two: `service.py` runs all processes on this machine, `multiworld_serving.deploy.ray.launcher` spreads them over the nodes
of a Ray cluster. Both start the same programs with the same settings (`programs.py`); no program knows which one started it.
`Launcher` is what a running service can be asked for; on Ray, `multiworld serve` has ended by then, and an actor scales the workers.
"""

from typing import Literal, NamedTuple, Protocol

Role = Literal["leader", "frontend", "worker"]


class Resources(NamedTuple):
    """What one process needs. The local launcher shares the machine and reserves nothing."""

    cores: float
    gpus: int = 0
    memory_bytes: int = 0
    """0: not reserved."""


class Launched(NamedTuple):
    """One process of a service.

    Attributes:
        name: in logs, metrics and the status.
        host: name of the node; empty for this machine.
        pid: None while it waits for a restart.
        restarts: how often it was started again.
    """

    role: Role
    name: str
    host: str
    pid: int | None
    restarts: int


class Launcher(Protocol):
    """Starts and stops workers of a running service. Used from one event loop."""

    async def processes(self) -> tuple[Launched, ...]:
        """All processes that should run."""

    async def scale_workers(self, count: int) -> None:
        """Start workers until there are `count`. Stops none: if there are more, the caller chooses which to stop.

        Returns when they are started; they join their leaders later. Raises UserError if the resources do not suffice; workers for which
        they do are started.
        """

    async def stop_worker(self, name: str) -> None:
        """Stop a worker for good: SIGTERM, after which it returns its batches, and SIGKILL after the stop timeout.

        Returns when it has ended. Its name may be used again. Raises KeyError if there is no such worker.
        """
