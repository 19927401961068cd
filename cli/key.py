"""`multiworld key`: make a key for callers of the service."""

import json
from pathlib import Path
from typing import Annotated

import typer

from cli.service import AsJson
from config import UserError
from config.keys import hashed, keys_of_text, read_keys
from config.tokens import new_token

EPILOG = """
[bold]Examples[/bold]

multiworld key alice --add-to api.keys > alice.key

multiworld serve --api-keys-file api.keys

multiworld predict --api-key-file alice.key photo.jpg
"""

Name = Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is, for the log.", show_default=False)]
AddTo = Annotated[
    Path | None,
    typer.Option("--add-to", metavar="FILE", help="Add the line NAME:HASH to this file, which may be new."),
]


def key(name: Name, add_to: AddTo = None, as_json: AsJson = False) -> int:
    """Make a new random key and print it: once, for only its SHA-256 is kept.

    The service knows keys by lines NAME:HASH in the files of --api-keys-file and --admin-keys-file. It reads them anew on
    SIGHUP. Without --add-to, the line is printed behind the key.
    """
    new = new_token().get_secret_value()
    line = f"{name}:{hashed(new)}"
    keys_of_text(line, f"the name {name!r}")
    if add_to is not None:
        _add(add_to, name, line)
    if as_json:
        print(json.dumps({"name": name, "key": new, "line": line}))
    else:
        print(new if add_to is not None else f"{new}\n{line}")
    return 0


def _add(file: Path, name: str, line: str) -> None:
    if file.exists() and file.stat().st_size and name in {known.name for known in read_keys(file)}:
        raise UserError(
            f"--add-to {file}: has a key of the name {name} already; take its line out, or choose another name"
        )
    try:
        with file.open("a+", encoding="utf-8") as lines:
            lines.seek(0)
            gap = "" if (text := lines.read()).endswith("\n") or not text else "\n"
            lines.write(f"{gap}{line}\n")
    except OSError as error:
        raise UserError(f"--add-to {file}: cannot be written: {error.strerror}") from error
