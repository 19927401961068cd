"""The command `multiworld`: registers the verbs and maps exceptions to exit statuses.

0  success
1  failure at run time
2  invalid input: one line on standard error says what was wrong, what was expected and what to do
130  interrupted by Ctrl-C
"""

import contextlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version as installed
from typing import Annotated, NoReturn

import typer

from multiworld_serving.cli.options import Options, program_command, verb_command
from multiworld_serving.cli.service import ServiceError
from multiworld_serving.cli.verbs import (
    admin,
    bench,
    chaos,
    credentials,
    export,
    models,
    predict,
    processes,
    status,
)
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.process import (
    ERROR_FIELD,
    SEND_TIMEOUT_S,
    STATUS_FIELD,
    notify,
    prepare_inherited,
)
from multiworld_serving.models.errors import ModelError

EPILOG = """
[bold]In two terminals[/bold]

multiworld serve --weights auto

multiworld predict photo.jpg

[bold]Exit status[/bold]: 0 success, 1 failure at run time, 2 invalid input (one line says what to do), 130 interrupted.
"""

app = typer.Typer(
    name="multiworld",
    help="Serve a model split into pipeline stages over several workers, and keep serving when workers fail.",
    epilog=EPILOG,
    no_args_is_help=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _add(verb: Callable[..., int], epilog: str) -> None:
    (parameter,) = inspect.signature(verb).parameters.values()
    is_program = not issubclass(parameter.annotation, Options)
    command = (program_command if is_program else verb_command)(verb, parameter.annotation)
    # Typer would show the line breaks inside the paragraphs of a docstring.
    paragraphs = inspect.cleandoc(verb.__doc__ or "").split("\n\n")
    app.command(help="\n\n".join(" ".join(text.split()) for text in paragraphs), epilog=epilog)(command)


_add(processes.serve, processes.SERVE_EPILOG)
_add(processes.down, processes.DOWN_EPILOG)
_add(processes.frontend, processes.FRONTEND_EPILOG)
_add(processes.leader, processes.LEADER_EPILOG)
_add(processes.worker, processes.WORKER_EPILOG)
_add(predict.predict, predict.EPILOG)
_add(export.export, export.EPILOG)
_add(status.status, status.EPILOG)
_add(bench.bench, bench.EPILOG)
_add(chaos.chaos, chaos.EPILOG)
_add(admin.rolling_restart, admin.RESTART_EPILOG)
_add(admin.load_version, admin.LOAD_EPILOG)
_add(admin.unload, admin.UNLOAD_EPILOG)
_add(models.models, models.EPILOG)
_add(credentials.key, credentials.KEY_EPILOG)
_add(credentials.token, credentials.TOKEN_EPILOG)


@app.callback(invoke_without_command=True)
def _without_verb(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the versions of multiworld, torch and torchvision, and exit.")
    ] = False,
) -> None:
    if show_version:
        versions = {"multiworld": "multiworld-serving", "torch": "torch", "torchvision": "torchvision"}
        print(", ".join(f"{name} {installed(package)}" for name, package in versions.items()))
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command line (that of this process if None), and end this process with its exit status.

    The interpreter is not finalized: for torch's modules that takes seconds and prints warnings. Programs have freed everything when
    they return.
    """
    prepare_inherited()
    status = main(arguments)
    logging.shutdown()
    try:
        sys.stdout.flush()
    except OSError as error:  # the disk is full, or the reader has ended
        status = status or _fail(f"cannot write standard output: {error.strerror}", 1)
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (that of this process if None). Returns the exit status."""
    try:
        return int(app(args=arguments, prog_name="multiworld", standalone_mode=False) or 0)
    except typer.TyperException as error:
        return _fail(_usage(error), 2)
    except (UserError, ModelError) as error:
        notify(STATUS_FIELD + " ".join(str(error).split()), SEND_TIMEOUT_S)
        return _fail(str(error), 2)
    except ServiceError as error:
        notify(ERROR_FIELD + " ".join(str(error).split()), SEND_TIMEOUT_S)
        return _fail(str(error), 1)
    except Exception as error:
        notify(ERROR_FIELD + " ".join(f"{type(error).__name__}: {error}".split()), SEND_TIMEOUT_S)
        raise
    except (KeyboardInterrupt, typer.Abort):
        return 130


def _usage(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    where = context.command_path if context else "multiworld"
    return f"{error.format_message().rstrip('.')} (see {where} --help)"


def _fail(message: str, status: int) -> int:
    # One write, because other processes log to the same file.
    sys.stderr.write(f"multiworld: error: {' '.join(message.split())}\n")
    return status


if __name__ == "__main__":
    run()
