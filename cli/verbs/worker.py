"""`multiworld worker`: one worker process on one device."""

from multiworld_serving.cli.options import settings_command
from multiworld_serving.workers.settings import WorkerSettings

EPILOG = """
[bold]Examples[/bold]

multiworld worker --leader 10.0.0.1:8001 --token-file token

MULTIWORLD_TOKEN=… multiworld worker --leader leader:8001 --device cuda:0
"""


@settings_command(WorkerSettings, process=lambda settings: settings.name)
def worker(settings: WorkerSettings) -> int:
    """Join a leader and compute the stage that it assigns, until stopped.

    A worker needs the address of the leader and the join token, but no model files. If the leader fails, the worker rejoins
    as soon as a leader is available. On SIGTERM or Ctrl-C it finishes its batches and leaves.
    """
    from multiworld_serving.workers.main import run

    return run(settings)
