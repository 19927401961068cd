"""Generates command line options from settings classes: type, bounds, default, help and environment variable."""

import functools
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape

from multiworld_serving.common.config import Settings, configure_logging, describe, load
from multiworld_serving.common.config.settings import ENV_PREFIX, bounds, declaration, fields_of, value_type
from multiworld_serving.common.config.sources import option, variable
from multiworld_serving.server.settings import FrontendSettings, LeaderSettings, ServeSettings
from multiworld_serving.workers.settings import WorkerSettings

logger = logging.getLogger(__name__)

PROGRAMS: tuple[type[Settings], ...] = (ServeSettings, LeaderSettings, FrontendSettings, WorkerSettings)
METAVARS = {"s": "SECONDS", "labels": "FILE", "host": "ADDRESS", "leader": "HOST:PORT"}
"""Placeholder of the value in `--help`, by the last word of the setting's name; the default is that word in capitals."""

S = TypeVar("S", bound=Settings)


def settings_command(cls: type[S], process: Callable[[S], str]) -> Callable[[Callable[[S], int]], Callable[..., int]]:
    """Decorator that turns a function of the settings into a typer command with one option per setting.

    Args:
        cls: the settings class of the program.
        process: returns the process name for log lines.
    """

    def decorate(run: Callable[[S], int]) -> Callable[..., int]:
        @functools.wraps(run)
        def command(*, config: Path | None, **options: object) -> int:
            given = {name: ",".join(value) if isinstance(value, list) else value for name, value in options.items()}
            settings = load(cls, given, config_file=config, programs=PROGRAMS).with_token()
            configure_logging(settings.log_level, settings.log_format, process=process(settings))
            logger.info("settings %s", describe(settings))
            return run(settings)

        parameters = [
            _config_parameter(),
            *(_parameter(*item) for item in fields_of(cls).items() if declaration(item[1])["in_argv"]),
        ]
        vars(command)["__signature__"] = inspect.Signature(parameters, return_annotation=int)
        return command

    return decorate


def _config_parameter() -> inspect.Parameter:
    text = f"TOML file with settings, in tables \\[serve] and \\[worker]. {_dim(f'{ENV_PREFIX}CONFIG')}"
    info = typer.Option("--config", metavar="FILE", help=text, show_default=False)
    return inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, info]
    )


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return the option of one setting. Values stay strings: the settings class validates values from every source alike."""
    is_flag = value_type(field) is bool
    info = typer.Option(
        option(name) + (f"/--no-{option(name)[2:]}" if is_flag else ""),
        metavar=None if is_flag else _metavar(name, field),
        help=_help(name, field),
        show_default=False,
        hidden=bool(declaration(field)["hidden"]),
        rich_help_panel=declaration(field)["panel"],
        autocompletion=_completion(_choices(field)),
    )
    kind = bool if is_flag else list[str] if declaration(field)["repeatable"] else str
    annotation = Annotated[kind | None, info]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _help(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else f"default {_default(field)}"
    declaration = [", ".join(_choices(field)), " ".join(bounds(field)), default, variable(name)]
    return f"{escape(field.description or '')} {_dim('; '.join(fact for fact in declaration if fact))}"


def _dim(text: str) -> str:
    return f"[dim]({escape(text)})[/dim]"


def _default(field: FieldInfo) -> str:
    """Return the default as written on the command line."""
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
