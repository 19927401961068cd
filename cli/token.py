"""`multiworld token`: make the join token that leader and workers share."""

from pathlib import Path
from typing import Annotated

import typer

from config.tokens import read_token, write_new_token

EPILOG = """
[bold]Examples[/bold]

multiworld token token

multiworld serve --external-workers --join-host 0.0.0.0 --token-file token
"""

File = Annotated[Path, typer.Argument(metavar="FILE", help="Where it is, or is to be.", show_default=False)]


def token(file: File) -> int:
    """Make a join token in a file that only you can read, unless there is one.

    The leader and all workers are then started with --token-file FILE. A file that is there is left as it is, if it holds a
    token: to change the token, remove it first.
    """
    if write_new_token(file):
        print(f"{file}: a new join token")
    else:
        read_token(file)
        print(f"{file}: holds a join token already")
    return 0
