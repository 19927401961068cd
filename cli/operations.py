"""How verbs for operators speak to a running service: the operators' port, and the right to use it."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cli.service import access
from config import Access
from config.tokens import read_token

OperationsUrl = Annotated[
    str,
    typer.Option(
        "--operations-url",
        envvar="MULTIWORLD_OPERATIONS_URL",
        metavar="URL",
        help="Address of the service's operators' port, the one of the metrics.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar="MULTIWORLD_TOKEN_FILE",
        metavar="FILE",
        help="File that holds the join token; not needed on the machine of a service that made up its own. "
        "MULTIWORLD_TOKEN may hold the token itself.",
    ),
]
DEFAULT_OPERATIONS_URL = "http://127.0.0.1:8002"


def admin_access(
    api_key_file: Path | None, token_file: Path | None, ca_file: Path | None, client_cert_file: Path | None
) -> Access:
    """How to get in: with an administrator's key, or else the join token. Raises UserError when a file cannot be used."""
    way_in = access(api_key_file, ca_file, client_cert_file)
    if way_in.key:
        return way_in
    token = read_token(token_file).get_secret_value() if token_file else os.environ.get("MULTIWORLD_TOKEN", "")
    return replace(way_in, key=token.strip())
