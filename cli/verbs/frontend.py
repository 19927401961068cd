"""`multiworld frontend`: one frontend process."""

from multiworld_serving.cli.options import settings_command
from multiworld_serving.server.settings import FrontendSettings

EPILOG = """
[bold]Example[/bold]

multiworld frontend --leader 10.0.0.1:8001 --leader 10.0.0.2:8001 --host 0.0.0.0 --token-file token
"""


@settings_command(FrontendSettings, process=lambda settings: settings.name)
def frontend(settings: FrontendSettings) -> int:
    """Serve HTTP: read requests, decode images, and send them to a leader. A request whose leader is lost goes to another one."""
    from multiworld_serving.server.frontends.main import run

    return run(settings)
