"""How verbs for operators speak to a running service: the operators' port, and the right to use it."""

import os
from pathlib import Path
from typing import Annotated

import typer

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


def admin_headers(token_file: Path | None) -> dict[str, str]:
    """What proves that this person may use operators' verbs. Raises SettingsError when the file holds no token."""
    token = read_token(token_file).get_secret_value() if token_file else os.environ.get("MULTIWORLD_TOKEN", "")
    return {"Authorization": f"Bearer {token.strip()}"} if token else {}
