"""`multiworld key` and `multiworld token`: create an API key, or the join token that the leader and the workers share."""

import json
from pathlib import Path

from multiworld_serving.cli.options import AsJson
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.keys import hash_key, parse_keys, read_keys
from multiworld_serving.common.config.settings import Options, setting
from multiworld_serving.common.config.tokens import new_token, read_token, write_secret


class KeyOptions(AsJson):
    """Options of `key`."""

    name: str = setting(positional=True)
    """Name of the key's owner, for the log."""
    add_to: Path | None = setting(None, metavar="FILE")
    """Append the line NAME:HASH to this file; created if it does not exist; by default the line is printed."""
    out: Path | None = setting(None, metavar="FILE")
    """Write the key to this new file, with mode 0600; by default it is printed."""


class TokenOptions(Options):
    """Options of `token`."""

    file: Path = setting(positional=True)
    """File of the token; created if it does not exist."""


def key(options: KeyOptions) -> int:
    """Generate a random API key and print it, or write it to a new file that only you can read (--out). Only its SHA-256 hash is stored.

    The service reads lines NAME:HASH from the files of --api-keys-file and --admin-keys-file, and reloads them on SIGHUP.
    Without --add-to, the line is printed after the key.

    Examples:
        multiworld key alice --add-to api.keys --out alice.key
        multiworld serve --api-keys-file api.keys
        multiworld predict --api-key-file alice.key photo.jpg
    """
    name, out, add_to = options.name, options.out, options.add_to
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
    if options.as_json:
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


def token(options: TokenOptions) -> int:
    """Create a file with a new join token, readable only by you.

    Start the leader and all workers with --token-file FILE. An existing file with a token is not changed: to replace the
    token, remove the file first.

    Examples:
        multiworld token token
        multiworld serve --external-workers --join-host 0.0.0.0 --token-file token
    """
    file = options.file
    if write_secret(file, new_token().get_secret_value()):
        print(f"{file}: a new join token")
    else:
        read_token(file)
        print(f"{file}: already has a join token")
    return 0
