"""Options of the verbs: generated from settings classes, expanded from option groups, and those that several verbs share."""

import copy
import dataclasses
import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from rich.markup import escape

from multiworld_serving.common.config import Settings, UserError, configure_logging, exit_with_parent, load
from multiworld_serving.common.config.settings import bounds, panel, public_fields, value_type
from multiworld_serving.common.config.sources import option, variable
from multiworld_serving.server.leader_settings import LeaderSettings
from multiworld_serving.server.settings import FrontendSettings, ServeSettings
from multiworld_serving.workers.settings import WorkerSettings

logger = logging.getLogger(__name__)

PROGRAMS: tuple[type[Settings], ...] = (ServeSettings, LeaderSettings, FrontendSettings, WorkerSettings)
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
METAVARS = {"s": "SECONDS", "labels": "FILE", "host": "ADDRESS", "leader": "HOST:PORT"}
"""Placeholder of the value in `--help`, by the last word of the setting's name; the default is that word in capitals."""
_IN_SHORT_HELP = {
    *("model", "handler", "stages", "replicas", "spares", "leaders", "autoscale", "device", "max_batch_size"),
    *("host", "http_port", "join_host", "leader", "external_workers", "token_file", "api_keys_file", "name"),
}
"""The settings that `--help` lists; `--help-all` lists all."""

S = TypeVar("S", bound=Settings)


def value(metavar: str, text: str, *names: str, **more: Any) -> Any:
    """Return an option with a value; its name is that of the parameter unless given."""
    return typer.Option(*names, metavar=metavar, help=text, **more)


def flag(name: str, text: str, **more: Any) -> Any:
    """Return an option without a value."""
    return typer.Option(name, help=text, **more)


def seconds(text: str) -> float:
    """Parse a duration such as "25ms", "9s" or "1.5h" into seconds; a number without unit is in seconds."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", text.strip())
    if match is None or (match[2] or "s") not in _UNITS:
        raise typer.BadParameter(
            f"{text!r} is not a duration: expected a number with a unit of {', '.join(_UNITS)}, such as 25ms or 1.5h"
        )
    return float(match[1]) * _UNITS[match[2] or "s"]


def duration(text: str, *names: str, parser: Callable[[str], float] = seconds) -> Any:
    """Return an option whose value is a duration."""
    return value("TIME", text, *names, parser=parser)


def assignments(texts: list[str] | None) -> dict[str, str]:
    """Parse the values of --set. Raises UserError."""
    pairs = [text.partition("=") for text in texts or []]
    if wrong := [name for name, equals, _ in pairs if not name or not equals]:
        raise UserError(f"--set {wrong[0]}: must be NAME=VALUE, such as image_size=64")
    return {name.strip().removeprefix("--").replace("-", "_"): text.strip() for name, _, text in pairs}


AsJson = Annotated[bool, flag("--json", "Print JSON instead of text.")]
Clients = Annotated[int, value("N", "Closed loop: number of clients, each with one request at a time.", min=1)]
Rate = Annotated[
    float | None,
    value(
        "HZ",
        "Open loop instead of --clients: requests per second at random times (Poisson), independent of the answers.",
        min=0.01,
    ),
]
Files = Annotated[
    list[Path] | None,
    value(
        "FILE",
        "Body of a request to /predict, may be repeated; default: requests are generated for the model.",
        "--file",
    ),
]


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """Options for the load."""

    panel: ClassVar[str] = "Load"
    clients: Clients = 8
    rate: Rate = None
    files: Files = None


def expand_groups(verb: Callable[..., int]) -> Callable[..., int]:
    """Replace each parameter that is an option group by one option per field.

    An option group is a dataclass; its fields are annotated like the parameters of a verb. `panel` is their heading in `--help`.
    """
    signature = inspect.signature(verb, eval_str=True)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if dataclasses.is_dataclass(parameter.annotation)
    }

    @functools.wraps(verb)
    def command(**options: Any) -> int:
        for name, group in groups.items():
            options[name] = group(**{field.name: options.pop(field.name) for field in dataclasses.fields(group)})
        return verb(**options)

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += _fields(groups[name]) if name in groups else [parameter.replace(kind=parameter.KEYWORD_ONLY)]
    vars(command)["__signature__"] = signature.replace(parameters=parameters)
    return command


def _fields(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        kind, info = get_args(hints[field.name])
        info = copy.copy(info)
        info.rich_help_panel = group.panel
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[kind, info]
        )


def settings_command(cls: type[S], process: Callable[[S], str]) -> Callable[[Callable[[S], int]], Callable[..., int]]:
    """Decorator that turns a function of the settings into a typer command with one option per setting.

    Args:
        cls: the settings class of the program.
        process: returns the process name for log lines.
    """

    def decorate(run: Callable[[S], int]) -> Callable[..., int]:
        @functools.wraps(run)
        def command(
            *, config: Path | None, settings_json: Path | None, print_settings: bool, help_all: bool, **options: object
        ) -> int:
            if settings_json is not None:
                exit_with_parent()  # also if this process is blocked: otherwise the next service could not use its ports
                settings = cls.model_validate_json(settings_json.read_bytes())
            else:
                given = {name: ",".join(each) if isinstance(each, list) else each for name, each in options.items()}
                settings = load(cls, given, config_file=config, programs=PROGRAMS).with_token()
            if print_settings:
                print("\n".join(f"{name} = {getattr(settings, name)}" for name in public_fields(cls)))
                return 0
            configure_logging(settings.log_level, settings.log_format, process=process(settings))
            logger.debug("settings %s", settings)
            return run(settings)

        parameters = [*_own_parameters(), *(_parameter(*item) for item in options_of(cls).items())]
        vars(command)["__signature__"] = inspect.Signature(parameters, return_annotation=int)
        return command

    return decorate


def options_of(cls: type[Settings]) -> dict[str, FieldInfo]:
    """The settings with an option. Secrets have none, because options are visible in the process list."""
    return {name: field for name, field in public_fields(cls).items() if value_type(field) is not SecretStr}


def _own_parameters() -> Iterator[inspect.Parameter]:
    """The options of the programs that are not settings."""
    file = value(
        "FILE", f"TOML file with settings, in tables such as \\[serve]. {_dim(variable('config'))}", "--config"
    )
    handed = value(
        "FILE", "All settings as JSON, from the process that starts this one.", "--settings-json", hidden=True
    )
    shown = flag("--print-settings", "Print the settings in effect, without secrets, and exit.")
    every = flag("--help-all", "Show all options, and exit.", is_eager=True, callback=_help_all)
    for name, kind, default, info in (
        ("config", Path | None, None, file),
        ("settings_json", Path | None, None, handed),
        ("print_settings", bool, False, shown),
        ("help_all", bool, False, every),
    ):
        annotation = Annotated[kind, info]  # type: ignore[valid-type]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _help_all(context: typer.Context, asked: bool) -> None:
    if asked:
        for parameter in context.command.params:
            parameter.hidden = parameter.name == "settings_json"  # type: ignore[attr-defined]
        print(context.get_help())
        raise typer.Exit


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return the option of one setting. Values stay strings: the settings class validates values from every source alike."""
    is_flag = value_type(field) is bool
    info = typer.Option(
        option(name) + (f"/--no-{option(name)[2:]}" if is_flag else ""),
        metavar=None if is_flag else _metavar(name, field),
        help=_help(field),
        show_default=False,
        hidden=name not in _IN_SHORT_HELP,
        rich_help_panel=panel(field),
    )
    kind = bool if is_flag else list[str] if name == "leader" else str
    annotation = Annotated[kind | None, info]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _help(field: FieldInfo) -> str:
    facts = [", ".join(_choices(field)), " ".join(bounds(field)), f"default {default_text(field)}"]
    return f"{escape(' '.join((field.description or '').split()))} {_dim('; '.join(filter(None, facts)))}"


def _dim(text: str) -> str:
    return f"[dim]({escape(text)})[/dim]"


def default_text(field: FieldInfo) -> str:
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
