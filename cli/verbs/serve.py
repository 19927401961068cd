"""`multiworld serve`: leaders, frontends and, by default, local workers."""

from multiworld_serving.cli.options import settings_command
from multiworld_serving.server.settings import ServeSettings

EPILOG = """
[bold]Examples[/bold]

multiworld serve --weights auto

multiworld serve --model resnet18 --stages 3 --replicas 2 --leaders 2 --weights random:0

multiworld serve --external-workers --join-host 0.0.0.0 --token-file token

curl -F image=@photo.jpg http://127.0.0.1:8000/predict
"""


@settings_command(ServeSettings, process=lambda _: "supervisor")
def serve(settings: ServeSettings) -> int:
    """Serve a model over HTTP, split into pipeline stages with several replicas each.

    Starts frontends, leaders and workers as processes and restarts those that end. When a worker dies, hangs or loses its network,
    another replica of its stage computes its batches; when a leader does, its requests go to another leader.
    Every option can also be set by the environment variable shown with it, or in a TOML file. The command line takes
    precedence over the environment, and the environment over the file. Ctrl-C drains and stops the service.
    """
    from multiworld_serving.deploy.processes.service import run

    return run(settings)
