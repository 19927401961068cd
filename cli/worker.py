"""`multiworld worker`: one stage worker, one process on one device."""

from cli.options import settings_command
from workers.settings import WorkerSettings

EPILOG = """
[bold]Examples[/bold]

multiworld worker --leader 10.0.0.1:8001 --token-file token

MULTIWORLD_TOKEN=… multiworld worker --leader leader:8001 --device cuda:0
"""


@settings_command(WorkerSettings, process=lambda settings: settings.name)
def worker(settings: WorkerSettings) -> int:
    """Join a leader and compute the stage that it gives, until stopped.

    A worker needs the leader's address and the join token, no model files. When the leader is gone it joins again by
    itself as soon as there is one. SIGTERM or Ctrl-C lets it finish what it has and say goodbye.
    """
    from workers.app import run

    return run(settings)
