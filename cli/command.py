"""Runs one command line with given verbs, and maps exceptions to exit statuses.


0  success
1  failure at run time
2  invalid input: one line on standard error says what was wrong, what was expected and what to do
130  interrupted by Ctrl-C
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version as installed
from typing import Any, NoReturn

from multiworld_serving.cli.options import HELP, Parser, run_verb
from multiworld_serving.cli.service import ServiceError
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.process import (
    ERROR_FIELD,
    SEND_TIMEOUT_S,
    STATUS_FIELD,
    notify,
    prepare_inherited,
)
from multiworld_serving.common.config.sources import nearest
from multiworld_serving.models.errors import ModelError

Verbs = Mapping[str, Callable[[Any], int]]
"""Functions by their verbs. Each takes its options and returns the exit status."""
_DESCRIPTION = """Serve a model split into pipeline stages over several workers, and keep serving when workers fail.

In two terminals:
  multiworld serve --weights auto
  multiworld predict photo.jpg

Exit status: 0 success, 1 failure at run time, 2 invalid input (one line says what to do), 130 interrupted.
"""


def run(verbs: Verbs, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command line (that of this process if None), and end this process with its exit status.

    The interpreter is not finalized: for torch's modules that takes seconds and prints warnings. Programs have freed everything when
    they return.
    """
    prepare_inherited()
    status = main(verbs, arguments)
    logging.shutdown()
    try:
        sys.stdout.flush()
    except OSError as error:  # the disk is full, or the reader has ended
        status = status or _fail(f"cannot write standard output: {error.strerror}", 1)
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(status)


def main(verbs: Verbs, arguments: Sequence[str] | None = None) -> int:
    """Run one command line (that of this process if None). Returns the exit status."""
    try:
        return _run(verbs, *(sys.argv[1:] if arguments is None else arguments))
    except (UserError, ModelError) as error:
        notify(STATUS_FIELD + " ".join(str(error).split()), SEND_TIMEOUT_S)
        return _fail(str(error), 2)
    except ServiceError as error:
        notify(ERROR_FIELD + " ".join(str(error).split()), SEND_TIMEOUT_S)
        return _fail(str(error), 1)
    except BrokenPipeError as error:  # such as `multiworld status | head`
        return _fail(f"cannot write standard output: {error.strerror}", 1)
    except Exception as error:
        notify(ERROR_FIELD + " ".join(f"{type(error).__name__}: {error}".split()), SEND_TIMEOUT_S)
        raise
    except KeyboardInterrupt:
        return 130


def _run(verbs: Verbs, name: str = "--help", *arguments: str) -> int:
    if name in verbs:
        return run_verb(name, verbs[name], arguments)
    if name == "--version":
        versions = {"multiworld": "multiworld-serving", "torch": "torch", "torchvision": "torchvision"}
        print(", ".join(f"{name} {installed(package)}" for name, package in versions.items()))
    elif name in HELP:
        parser = Parser("multiworld", "VERB [options]", _DESCRIPTION)
        parser.add_argument(
            "--version", action="store_true", help="print the versions of multiworld, torch and torchvision, and exit"
        )
        group = parser.add_argument_group("verbs; `multiworld VERB --help` describes one")
        for verb in verbs:
            group.add_argument(verb, help=(verbs[verb].__doc__ or "").partition("\n\n")[0])
        parser.print_help()
    else:
        raise UserError(f"unknown verb {name}{nearest(name, [*verbs, '--version'])} (see multiworld --help)")
    return 0


def _fail(message: str, status: int) -> int:
    # One write, because other processes log to the same file.
    sys.stderr.write(f"multiworld: error: {' '.join(message.split())}\n")
    return status
