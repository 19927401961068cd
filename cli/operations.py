"""Options and credentials of the verbs that use the admin port of a running service."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from multiworld_serving.cli.service import access
from multiworld_serving.common.config import ClientCredentials
from multiworld_serving.common.config.tokens import read_token

OperationsUrl = Annotated[
    str,
    typer.Option(
        "--operations-url",
        envvar="MULTIWORLD_OPERATIONS_URL",
        metavar="URL",
        help="URL of the admin port of the service (the port of /metrics).",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar="MULTIWORLD_TOKEN_FILE",
        metavar="FILE",
        help="File with the join token; not needed on the machine of a service that generated its own. "
        "Alternatively, MULTIWORLD_TOKEN holds the token itself.",
    ),
]
DEFAULT_OPERATIONS_URL = "http://127.0.0.1:8002"


def admin_access(
    api_key_file: Path | None, token_file: Path | None, ca_file: Path | None, client_cert_file: Path | None
) -> ClientCredentials:
    """Return credentials: the API key of an administrator, otherwise the join token. Raises UserError if a file is invalid."""
    credentials = access(api_key_file, ca_file, client_cert_file)
    if credentials.key:
        return credentials
    token = read_token(token_file).get_secret_value() if token_file else os.environ.get("MULTIWORLD_TOKEN", "")
    return replace(credentials, key=token.strip())
