"""`multiworld status`: show the state of a running service."""

from typing import Annotated

from multiworld_serving.cli.options import AsJson, flag
from multiworld_serving.cli.service import DEFAULT_URL, Access, TimeoutS, Urls, answer_errors, open_clients, read_status
from multiworld_serving.cli.status_table import render_status
from multiworld_serving.common.config import UserError

EPILOG = """
[bold]Examples[/bold]

multiworld status

multiworld status --watch

multiworld status --json --url http://10.0.0.1:8000
"""

Watch = Annotated[bool, flag("--watch", "Keep running and show changes as they happen, until Ctrl-C.")]


def status(
    *,
    urls: Urls = (DEFAULT_URL,),  # type: ignore[assignment]
    as_json: AsJson = False,
    watch: Watch = False,
    timeout_s: TimeoutS = 10.0,
    access: Access,
) -> int:
    """Show the stages of a running service, their replicas, and the last failure of each."""
    if watch and as_json:
        raise UserError("--watch and --json exclude each other: programs read GET /events")
    with open_clients(urls, timeout_s, access.credentials()) as clients, answer_errors(", ".join(urls)):
        if watch:
            from multiworld_serving.cli.watch import watch as watch_status

            return watch_status(clients)
        response = read_status(clients)
        if as_json:
            print(response.text)
            return 0
        from multiworld_serving.cli.console import console

        console().print(render_status(response.json()))
    return 0
