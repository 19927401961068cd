"""`multiworld token`: create the join token that the leader and the workers share."""

from pathlib import Path
from typing import Annotated

import typer

from multiworld_serving.common.config.tokens import read_token, write_new_token

EPILOG = """
[bold]Examples[/bold]

multiworld token token

multiworld serve --external-workers --join-host 0.0.0.0 --token-file token
"""

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="File of the token; created if it does not exist.", show_default=False)
]


def token(file: File) -> int:
    """Create a file with a new join token, readable only by you.

    Start the leader and all workers with --token-file FILE. An existing file with a token is not changed: to replace the
    token, remove the file first.
    """
    if write_new_token(file):
        print(f"{file}: a new join token")
    else:
        read_token(file)
        print(f"{file}: already has a join token")
    return 0
