"""`multiworld serve`, `worker` and the internal `frontend`: the processes of the service."""

from contextlib import nullcontext
from functools import partial
from typing import Annotated, Literal

import typer

from multiworld_serving.cli.options import settings_command
from multiworld_serving.common.config import configure_logging
from multiworld_serving.server.settings import ServeSettings
from multiworld_serving.workers.settings import WorkerSettings

SERVE_EPILOG = """
[bold]Examples[/bold]

multiworld serve --weights auto

multiworld serve --model resnet18 --stages 3 --replicas 2 --weights random:0

multiworld serve --external-workers --join-host 0.0.0.0 --token-file token

curl -F image=@photo.jpg http://127.0.0.1:8000/predict
"""
WORKER_EPILOG = """
[bold]Examples[/bold]

multiworld worker --leader 10.0.0.1:8001 --token-file token

MULTIWORLD_TOKEN=… multiworld worker --leader leader:8001 --device cuda:0
"""


@settings_command(ServeSettings, process=lambda _: "leader")
def serve(settings: ServeSettings) -> int:
    """Serve a model over HTTP, split into pipeline stages with several replicas each.

    When a worker dies, hangs or loses its network, another replica of its stage computes its batches and no request fails.
    Every option can also be set by the environment variable shown with it, or in a TOML file. The command line takes
    precedence over the environment, and the environment over the file. Ctrl-C drains and stops the service.
    """
    from multiworld_serving.deploy.processes.environment import worker_fork_server

    local = not settings.external_workers
    # Start the fork server first: both processes then import torch at the same time.
    with worker_fork_server(settings) if local or settings.frontends > 1 else nullcontext() as fork_server:
        from multiworld_serving.deploy.processes.frontends import frontends
        from multiworld_serving.deploy.processes.local_workers import local_workers
        from multiworld_serving.server.main import run
        from multiworld_serving.server.processes import Processes

        workers = partial(local_workers, fork_server=fork_server) if local else None
        return run(settings, Processes(workers, partial(frontends, fork_server=fork_server)))


@settings_command(WorkerSettings, process=lambda settings: settings.name)
def worker(settings: WorkerSettings) -> int:
    """Join a leader and compute the stage that it assigns, until stopped.

    A worker needs the address of the leader and the join token, but no model files. If the leader fails, the worker rejoins
    as soon as a leader is available. On SIGTERM or Ctrl-C it finishes its batches and leaves.
    """
    from multiworld_serving.workers.main import run

    return run(settings)


def frontend(
    name: Annotated[str, typer.Option(help="Name of this frontend.")],
    leader: Annotated[str, typer.Option(help="Path of the Unix socket of the leader.")],
    log_level: Annotated[str, typer.Option(help="Minimum severity of log lines.")] = "info",
    log_format: Annotated[Literal["text", "json"], typer.Option(help="Format of log lines.")] = "text",
) -> int:
    """Serve HTTP on the socket that the leader passes, and forward requests to the leader."""
    configure_logging(log_level, log_format, process=name)
    from multiworld_serving.server.frontends.process import run

    return run(leader, name)
