"""`multiworld leader`: one leader process."""

from multiworld_serving.cli.options import settings_command
from multiworld_serving.server.settings import LeaderSettings

EPILOG = """
[bold]Example[/bold]

multiworld leader --model resnet18 --weights random:0 --join-host 0.0.0.0 --token-file token
"""


@settings_command(LeaderSettings, process=lambda settings: settings.leader_name)
def leader(settings: LeaderSettings) -> int:
    """Schedule the requests of frontends over workers. Frontends and workers join at the same port.

    Several leaders of one model share nothing and use the same workers: name all of them to each frontend and worker.
    """
    from multiworld_serving.server.main import run

    return run(settings)
