"""`multiworld status`: show the state of a running service."""

from typing import Annotated

import typer

from multiworld_serving.cli.service import (
    DEFAULT_URL,
    ApiKeyFile,
    AsJson,
    CaFile,
    ClientCertFile,
    ServiceError,
    TimeoutS,
    Url,
    access,
    open_client,
    send_request,
)
from multiworld_serving.cli.status_table import render_status
from multiworld_serving.common.config import ClientCredentials, UserError

EPILOG = """
[bold]Examples[/bold]

multiworld status

multiworld status --watch

multiworld status --json --url http://10.0.0.1:8000
"""

Watch = Annotated[bool, typer.Option("--watch", help="Keep running and show changes as they happen, until Ctrl-C.")]


def status(
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
    watch: Watch = False,
    timeout_s: TimeoutS = 10.0,
    api_key_file: ApiKeyFile = None,
    ca_file: CaFile = None,
    client_cert_file: ClientCertFile = None,
) -> int:
    """Show the stages of a running service, their replicas, and the last failure of each."""
    credentials = access(api_key_file, ca_file, client_cert_file)
    if watch:
        return _watch(url, timeout_s, credentials, as_json=as_json)
    with open_client(url, timeout_s, credentials) as client:
        response = send_request(client, "GET", "/status", headers={"Accept": "application/json"})
    if as_json:
        print(response.text)
        return 0
    from multiworld_serving.cli.console import console

    try:
        table = render_status(response.json())
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ServiceError(f"{url} does not answer like a multiworld service of this version") from error
    console().print(table)
    return 0


def _watch(url: str, timeout_s: float, credentials: ClientCredentials, *, as_json: bool) -> int:
    if as_json:
        raise UserError("--watch and --json exclude each other: programs read GET /events")
    from multiworld_serving.cli.watch import watch

    try:
        return watch(url, timeout_s, credentials)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ServiceError(f"{url} does not answer like a multiworld service of this version") from error
