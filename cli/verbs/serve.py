"""`multiworld serve`: the leader, its HTTP API and, by default, local workers."""

from contextlib import nullcontext
from functools import partial

from multiworld_serving.cli.options import settings_command
from multiworld_serving.server.settings import ServeSettings

EPILOG = """
[bold]Examples[/bold]

multiworld serve --weights auto

multiworld serve --model resnet18 --stages 3 --replicas 2 --weights random:0

multiworld serve --external-workers --join-host 0.0.0.0 --token-file token

curl -F image=@photo.jpg http://127.0.0.1:8000/predict
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
