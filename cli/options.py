"""Options of the verbs: a verb declares them as the fields of one class, like settings, and is called with an object of it."""

import functools
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr
from pydantic.fields import FieldInfo
from rich.markup import escape

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.logs import configure_logging
from multiworld_serving.common.config.process import exit_with_parent
from multiworld_serving.common.config.settings import Settings, bounds, extra, panel, public_fields, value_type
from multiworld_serving.common.config.sources import load, option, validated
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.common.settings.serve import FrontendSettings, ServeSettings
from multiworld_serving.common.settings.worker import WorkerSettings

logger = logging.getLogger(__name__)

PROGRAMS: tuple[type[Settings], ...] = (ServeSettings, LeaderSettings, FrontendSettings, WorkerSettings)
METAVARS = {"s": "SECONDS", "labels": "FILE", "host": "ADDRESS", "leader": "HOST:PORT"}
"""Placeholder of the value in `--help`, by the last word of the setting's name; the default is that word in capitals."""
_IN_SHORT_HELP = {
    *("model", "handler", "stages", "replicas", "spares", "leaders", "autoscale", "device", "max_batch_size"),
    *("host", "http_port", "join_host", "leader", "external_workers", "token_file", "api_keys_file", "name"),
}
"""The settings that `--help` lists; `--help-all` lists all."""
_REPEATED = ("leader", "model")
"""Settings whose option may be repeated: its values are separated by commas. An option of a verb with such a name is not repeated."""
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


class Options(BaseModel):
    """The options of a verb. The docstring below a field is its description in `--help`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


OptionsType = TypeVar("OptionsType", bound=Options)
S = TypeVar("S", bound=Settings)


def value(
    default: Any = ...,
    panel: str = "Options",
    *,
    names: tuple[str, ...] = (),
    metavar: str = "",
    variable: str = "",
    positional: bool = False,
    allowed: str = "",
    **bounds: Any,
) -> Any:
    """Declare one option of a verb.

    Args:
        default: `...` = the option is required.
        panel, allowed, bounds: as for `setting`.
        names: as on the command line; by default derived from the name of the field.
        metavar: placeholder of the value in `--help`; by default derived from the name of the field.
        variable: environment variable that is used if the option is not given.
        positional: it is an argument and has no name on the command line.
    """
    facts: Any = {"panel": panel, "allowed": allowed, "names": names, "metavar": metavar, "variable": variable}
    return Field(default, json_schema_extra={**facts, "positional": positional}, **bounds)


def seconds(text: str | float) -> float:
    """Parse a duration such as "25ms", "9s" or "1.5h" into seconds; a number without unit is in seconds. Raises ValueError."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", str(text).strip())
    if match is None or (match[2] or "s") not in _UNITS:
        raise ValueError("not a duration")
    return float(match[1]) * _UNITS[match[2] or "s"]


Duration = Annotated[float, BeforeValidator(seconds)]


def duration(default: float | None, panel: str, name: str) -> Any:
    """Declare an option of type `Duration`."""
    allowed = f"a number with a unit of {', '.join(_UNITS)}, such as 25ms or 1.5h"
    return value(default, panel, names=(name,), metavar="TIME", allowed=allowed)


class AsJson(Options):
    """The option --json."""

    as_json: bool = value(False, names=("--json",))
    """Print JSON instead of text."""


class LoadOptions(Options):
    """Options for the load."""

    clients: int = value(8, "Load", ge=1)
    """Closed loop: number of clients, each with one request at a time."""
    rate: float | None = value(None, "Load", metavar="HZ", ge=0.01)
    """Open loop instead of --clients: requests per second at random times (Poisson), independent of the responses."""
    files: tuple[Path, ...] = value((), "Load", names=("--file",), metavar="FILE")
    """Body of a request to /predict, may be repeated; by default requests are generated for the model."""


class _ProgramOptions(Options):
    """The options of the programs that are not settings."""

    config: Path | None = value(None, metavar="FILE")
    """TOML file with settings, in tables such as [serve]; by default that of MULTIWORLD_CONFIG."""
    settings_json: Path | None = value(None, metavar="FILE")
    """All settings as JSON, from the process that starts this one."""
    print_settings: bool = value(False, names=("--print-settings",))
    """Print the settings in effect, without secrets, and exit."""
    help_all: bool = value(False, names=("--help-all",))
    """Show all options, and exit."""


def epilog(*examples: str, note: str = "", exit_status: str = "") -> str:
    """The text at the end of `--help`: examples, a note, and what the exit status says."""
    parts = ["[bold]Examples[/bold]", *map(escape, examples)] if examples else []
    status = f"[bold]Exit status[/bold]: {exit_status}" if exit_status else ""
    return "\n\n".join(filter(None, [*parts, note, status]))


def verb_command(verb: Callable[[OptionsType], int], cls: type[OptionsType]) -> Callable[..., int]:
    """The typer command of a verb with these options."""

    @functools.wraps(verb)
    def command(**given: object) -> int:
        return verb(_parsed(cls, given))

    parameters = [_parameter(name, field) for name, field in cls.model_fields.items()]
    vars(command)["__signature__"] = inspect.Signature(parameters, return_annotation=int)
    return command


def program_command(program: Callable[[S], int], cls: type[S]) -> Callable[..., int]:
    """The typer command of a program, with one option for each setting."""

    @functools.wraps(program)
    def command(*, context: typer.Context, **given: object) -> int:
        own = _parsed(_ProgramOptions, {name: given.pop(name) for name in _ProgramOptions.model_fields})
        if own.help_all:
            for parameter in context.command.params:
                parameter.hidden = parameter.name == "settings_json"  # type: ignore[attr-defined]
            print(context.get_help())
            return 0
        if own.settings_json is not None:
            exit_with_parent()  # also if this process is blocked: otherwise the next service could not use its ports
            settings = cls.model_validate_json(own.settings_json.read_bytes())
        else:
            options = {name: ",".join(each) or None if isinstance(each, list) else each for name, each in given.items()}
            settings = load(cls, options, config_file=own.config, programs=PROGRAMS).with_token()
        if own.print_settings:
            tables: tuple[dict[str, Any], ...] = getattr(settings, "models", ())
            names = (name for name in public_fields(cls) if not (tables and name == "model"))
            lines = [f"{name} = {getattr(settings, name)}" for name in names]
            for table in tables:
                lines += ["", "[[models]]", *(f"{name} = {value}" for name, value in table.items())]
            print("\n".join(lines))
            return 0
        process = "supervisor" if isinstance(settings, ServeSettings) else str(getattr(settings, "name", ""))
        configure_logging(settings.log_level, settings.log_format, process=process)
        logger.debug("settings %s", settings)
        return program(settings)

    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    own = [
        _parameter(name, field, hidden=name == "settings_json") for name, field in _ProgramOptions.model_fields.items()
    ]
    settings = [_parameter(name, field, hidden=name not in _IN_SHORT_HELP) for name, field in options_of(cls).items()]
    vars(command)["__signature__"] = inspect.Signature([context, *own, *settings], return_annotation=int)
    return command


def options_of(cls: type[Settings]) -> dict[str, FieldInfo]:
    """The settings with an option. Secrets have none, because options are visible in the process list."""
    return {name: field for name, field in public_fields(cls).items() if value_type(field) is not SecretStr}


def default_text(field: FieldInfo) -> str:
    """Return the default as written on the command line."""
    value = field.default
    if field.default_factory or value in (None, ()):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def assignments(texts: tuple[str, ...]) -> dict[str, str]:
    """Parse the values of --set. Raises UserError."""
    pairs = [text.partition("=") for text in texts]
    if wrong := [name for name, equals, _ in pairs if not name or not equals]:
        raise UserError(f"--set {wrong[0]}: must be NAME=VALUE, such as image_size=64")
    return {name.strip().removeprefix("--").replace("-", "_"): text.strip() for name, _, text in pairs}


def _parsed(cls: type[OptionsType], given: Mapping[str, Any]) -> OptionsType:
    """The options as given on the command line. Raises SettingsError."""
    names = {name: extra(field)["names"] or (option(name),) for name, field in cls.model_fields.items()}
    found = {name: each for name, each in given.items() if each is not None}
    return validated(cls, found, lambda name, text: f"{names[name][0]} {text}")


def _parameter(name: str, field: FieldInfo, *, hidden: bool = False) -> inspect.Parameter:
    """The option or argument of one field. Values stay strings: the class validates values from every source alike."""
    facts, kind = extra(field), value_type(field)
    is_flag = kind is bool
    shown: dict[str, Any] = {"help": _help(field), "show_default": False}
    shown["metavar"] = None if is_flag else facts.get("metavar") or _metavar(name, field)
    info: Any
    if facts.get("positional"):
        info = typer.Argument(**shown)
    else:
        names: list[Any] = facts.get("names") or [option(name) + (f"/--no-{option(name)[2:]}" if is_flag else "")]
        shown |= {"envvar": facts.get("variable") or None, "rich_help_panel": panel(field), "hidden": hidden}
        info = typer.Option(*names, **shown)
    is_repeated = get_origin(kind) is tuple or (name in _REPEATED and "positional" not in facts)
    typed: Any = bool if is_flag else list[str] if is_repeated else str
    if field.is_required():
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[typed, info])
    annotation = Annotated[typed | None, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _help(field: FieldInfo) -> str:
    """Description, allowed values and default; the description of a computed default says what it is."""
    text = " ".join((field.description or "").split())
    kind: Any = value_type(field)
    facts = [", ".join(get_args(kind)) if get_origin(kind) is Literal else "", " ".join(bounds(field))]
    if not (field.is_required() or "default" in text.lower() or (kind is bool and extra(field).get("names"))):
        facts.append(f"default {default_text(field)}")
    shown = "; ".join(filter(None, facts))
    return escape(text) + (f" [dim]({escape(shown)})[/dim]" if shown else "")


def _metavar(name: str, field: FieldInfo) -> str:
    if value_type(field) is int and not name.endswith(("_port", "_bytes")):
        return "N"
    last = name.rsplit("_", maxsplit=1)[-1]
    return METAVARS.get(last, last.upper())
