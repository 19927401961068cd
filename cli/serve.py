"""`multiworld serve`: the leader, its HTTP API and, unless told otherwise, local workers."""

from contextlib import nullcontext
from functools import partial

from cli.options import settings_command
from server.settings import ServeSettings

EPILOG = """
[bold]Examples[/bold]

multiworld serve --weights auto

multiworld serve --model resnet18 --stages 3 --replicas 2 --weights random:0

multiworld serve --external-workers --join-host 0.0.0.0 --token-file token

curl -F image=@photo.jpg http://127.0.0.1:8000/predict
"""


@settings_command(ServeSettings, process=lambda _: "leader")
def serve(settings: ServeSettings) -> int:
    """Serve a model over HTTP, cut into stages, each on several workers.

    A worker that dies, hangs or is cut off costs no request: another replica of its stage takes over. Every option can
    also be set by the environment variable shown with it, or in a TOML file; the command line wins over the
    environment, and that over the file. Ctrl-C drains and stops everything.
    """
    from deploy.worker_forks import worker_forks

    local = not settings.external_workers
    # It imports torch while this process does.
    with worker_forks(settings) if local or settings.frontends > 1 else nullcontext() as forks:
        from deploy.frontends import frontends
        from deploy.local_workers import local_workers
        from server.app import run
        from server.processes import Processes

        workers = partial(local_workers, forks=forks) if local else None
        return run(settings, Processes(workers, partial(frontends, forks=forks)))
