"""The process of a handler: loads the user's class and answers the frontend until it closes the connection.

python -m multiworld_serving.server.api.handler.program DESCRIPTOR FILE.py:CLASS
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from multiworld_serving.common.config.process import exit_with_parent
from multiworld_serving.server.api.handler.exchange import (
    Kind,
    pack_arrays,
    pack_text,
    receive,
    send,
    unpack_arrays,
    unpack_text,
)


def load_handler(where: str) -> Any:
    """Create the handler. Raises ValueError that says what is wrong with `where`, FILE.py:CLASS."""
    file, separator, name = where.rpartition(":")
    path = Path(file)
    if not separator or not name.isidentifier():
        raise ValueError(f"{where!r} is not FILE.py:CLASS, such as tokenizer.py:Handler")
    if not path.is_file():
        raise ValueError(f"there is no file {file}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
        cls = getattr(module, name, None)
        if not isinstance(cls, type):
            raise ValueError(f"{file} has no class {name}")  # noqa: TRY004 - the user's input is wrong
        handler = cls()
    except ValueError:
        raise
    except BaseException as error:
        raise ValueError(f"{file} cannot be loaded: {_last_line(error)}") from error
    for method in ("decode", "encode"):
        if not callable(getattr(handler, method, None)):
            raise ValueError(f"the class {name} of {file} has no method {method}")  # noqa: TRY004 - as above
    return handler


def _last_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _answer(handler: Any, kind: Kind, content: bytes) -> tuple[Kind, bytes]:
    try:
        if kind is Kind.DECODE:
            content_type, body = unpack_text(content)
            arrays = handler.decode(body, content_type)
            if not isinstance(arrays, dict):
                raise TypeError(f"decode returned {type(arrays).__name__}; expected a dict of arrays")
            return Kind.RESULT, pack_arrays(arrays)
        encoded, content_type = handler.encode(unpack_arrays(content))
        return Kind.RESULT, pack_text(str(content_type), bytes(encoded))
    except ValueError as error:
        if kind is Kind.DECODE:
            return Kind.INVALID, str(error).encode()
        return Kind.FAILED, traceback.format_exc().encode()
    except Exception:  # noqa: BLE001 - whatever the user's code raises goes to the log
        return Kind.FAILED, traceback.format_exc().encode()


def main() -> None:
    exit_with_parent()
    os.dup2(2, 1)  # what the handler prints goes to the log
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        try:
            handler = load_handler(sys.argv[2])
        except ValueError as error:
            send(sock, Kind.FAILED, str(error).encode())
            return
        send(sock, Kind.RESULT, b"")
        while True:
            try:
                kind, content = receive(sock)
            except EOFError:
                return
            send(sock, *_answer(handler, kind, content))


if __name__ == "__main__":
    main()
