"""`multiworld key` and `multiworld token`: create an API key, or the join token that the leader and the workers share."""

import json
from pathlib import Path
from typing import Annotated

import typer

from multiworld_serving.cli.options import AsJson
from multiworld_serving.common.config import UserError
from multiworld_serving.common.config.keys import hash_key, parse_keys, read_keys
from multiworld_serving.common.config.tokens import new_token, read_token, write_secret

KEY_EPILOG = """
[bold]Examples[/bold]

multiworld key alice --add-to api.keys --out alice.key

multiworld serve --api-keys-file api.keys

multiworld predict --api-key-file alice.key photo.jpg
"""
TOKEN_EPILOG = """
[bold]Examples[/bold]

multiworld token token

multiworld serve --external-workers --join-host 0.0.0.0 --token-file token
"""  # noqa: S105 - no password

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key's owner, for the log.", show_default=False)]
AddTo = Annotated[
    Path | None,
    typer.Option(
        "--add-to", metavar="FILE", help="Append the line NAME:HASH to this file; created if it does not exist."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", help="Write the key to this new file, with mode 0600, instead of printing it."
    ),
]
File = Annotated[
    Path, typer.Argument(metavar="FILE", help="File of the token; created if it does not exist.", show_default=False)
]


def key(name: Name, add_to: AddTo = None, out: Out = None, as_json: AsJson = False) -> int:
    """Generate a random API key and print it, or write it to a new file that only you can read (--out). Only its SHA-256 hash is stored.

    The service reads lines NAME:HASH from the files of --api-keys-file and --admin-keys-file, and reloads them on SIGHUP.
    Without --add-to, the line is printed after the key.
    """
    new = new_token().get_secret_value()
    line = f"{name}:{hash_key(new)}"
    parse_keys(line, f"the name {name!r}")
    if out is not None and not write_secret(out, new):
        raise UserError(f"--out {out}: exists already; remove it, or choose another name")
    try:
        if add_to is not None:
            _add(add_to, name, line)
    except UserError:
        if out is not None:
            out.unlink(missing_ok=True)
        raise
    shown = {"name": name, **({"key": new} if out is None else {"file": str(out)}), "line": line}
    if as_json:
        print(json.dumps(shown))
    else:
        lines = [new if out is None else f"{out}: the key of {name}", *([] if add_to is not None else [line])]
        print("\n".join(lines))
    return 0


def _add(file: Path, name: str, line: str) -> None:
    if file.exists() and file.stat().st_size and name in read_keys(file).values():
        raise UserError(f"--add-to {file}: already has a key named {name}; remove its line, or choose another name")
    try:
        with file.open("a+", encoding="utf-8") as lines:
            lines.seek(0)
            gap = "" if (text := lines.read()).endswith("\n") or not text else "\n"
            lines.write(f"{gap}{line}\n")
    except OSError as error:
        raise UserError(f"--add-to {file}: cannot be written: {error.strerror}") from error


def token(file: File) -> int:
    """Create a file with a new join token, readable only by you.

    Start the leader and all workers with --token-file FILE. An existing file with a token is not changed: to replace the
    token, remove the file first.
    """
    if write_secret(file, new_token().get_secret_value()):
        print(f"{file}: a new join token")
    else:
        read_token(file)
        print(f"{file}: already has a join token")
    return 0
