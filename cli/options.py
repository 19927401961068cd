"""Command line options made from a program's settings: type, bounds, default, help and environment variable in one place."""

import functools
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape

from config import Settings, configure_logging, describe, load
from config.settings import ENV_PREFIX, bounds, facts, fields_of, value_type
from config.sources import option, variable
from server.settings import ServeSettings
from workers.settings import WorkerSettings

logger = logging.getLogger(__name__)

PROGRAMS: tuple[type[Settings], ...] = (ServeSettings, WorkerSettings)
METAVARS = {"s": "SECONDS", "labels": "FILE", "host": "ADDRESS", "leader": "HOST:PORT"}
"""What stands for the value in `--help`, by the last word of a setting's name, where that word itself does not do."""

S = TypeVar("S", bound=Settings)


def settings_command(cls: type[S], process: Callable[[S], str]) -> Callable[[Callable[[S], int]], Callable[..., int]]:
    """Turn a function of the settings into one with an option for each of them, for typer to look at.

    Args:
        cls: the settings of the program.
        process: gives the name that this process has in its log lines.
    """

    def decorate(run: Callable[[S], int]) -> Callable[..., int]:
        @functools.wraps(run)
        def command(*, config: Path | None, **options: object) -> int:
            said = {name: ",".join(value) if isinstance(value, list) else value for name, value in options.items()}
            settings = load(cls, said, config_file=config, programs=PROGRAMS).with_token()
            configure_logging(settings.log_level, settings.log_format, process=process(settings))
            logger.info("settings %s", describe(settings))
            return run(settings)

        parameters = [
            _config_parameter(),
            *(_parameter(*item) for item in fields_of(cls).items() if facts(item[1])["in_argv"]),
        ]
        vars(command)["__signature__"] = inspect.Signature(parameters, return_annotation=int)
        return command

    return decorate


def _config_parameter() -> inspect.Parameter:
    text = f"TOML file with settings, in tables \\[serve] and \\[worker]. {_aside(f'{ENV_PREFIX}CONFIG')}"
    info = typer.Option("--config", metavar="FILE", help=text, show_default=False)
    return inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, info]
    )


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """Values stay text here: the settings check them, whichever source they come from, and say what is wrong in one way."""
    is_flag = value_type(field) is bool
    info = typer.Option(
        option(name) + (f"/--no-{option(name)[2:]}" if is_flag else ""),
        metavar=None if is_flag else _metavar(name, field),
        help=_help(name, field),
        show_default=False,
        hidden=bool(facts(field)["hidden"]),
        rich_help_panel=facts(field)["panel"],
        autocompletion=_completion(_choices(field)),
    )
    kind = bool if is_flag else list[str] if facts(field)["repeatable"] else str
    annotation = Annotated[kind | None, info]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _help(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else f"default {_default(field)}"
    facts = [", ".join(_choices(field)), " ".join(bounds(field)), default, variable(name)]
    return f"{escape(field.description or '')} {_aside('; '.join(fact for fact in facts if fact))}"


def _aside(text: str) -> str:
    return f"[dim]({escape(text)})[/dim]"


def _default(field: FieldInfo) -> str:
    """The default as one would write it on the command line."""
    value = field.default
    if field.default_factory or value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _metavar(name: str, field: FieldInfo) -> str:
    if value_type(field) is int and not name.endswith(("_port", "_bytes")):
        return "N"
    last = name.rsplit("_", maxsplit=1)[-1]
    return METAVARS.get(last, last.upper())


def _choices(field: FieldInfo) -> tuple[str, ...]:
    kind: Any = value_type(field)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _completion(choices: tuple[str, ...]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete
