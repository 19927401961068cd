"""The command line of the verbs: each option is a field of the class that the verb takes, `Options` or `Settings`."""

import argparse
import inspect
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.logs import configure_logging
from multiworld_serving.common.config.process import exit_with_parent
from multiworld_serving.common.config.settings import (
    INTERNAL,
    Options,
    Settings,
    bounds,
    extra,
    panel,
    public_fields,
    setting,
    value_type,
)
from multiworld_serving.common.config.sources import load, nearest, option, validated, variable
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.common.settings.serve import FrontendSettings, ServeSettings
from multiworld_serving.common.settings.worker import WorkerSettings

logger = logging.getLogger(__name__)

PROGRAMS: tuple[type[Settings], ...] = (ServeSettings, LeaderSettings, FrontendSettings, WorkerSettings)
METAVARS = {"s": "SECONDS", "labels": "FILE", "host": "ADDRESS", "leader": "HOST:PORT"}
"""Placeholder of the value in `--help`, by the last word of the setting's name; the default is that word in capitals."""
_IN_SHORT_HELP = {
    *("model", "stages", "replicas", "spares", "leaders", "autoscale", "device", "max_batch_size"),
    *("host", "http_port", "join_host", "leader", "external_workers", "token_file", "api_keys_file", "name"),
}
"""The settings that `--help` lists; `--help-all` lists all."""
HELP = frozenset({"-h", "--help", "--help-all"})
_NARGS = {(False, False): "?", (False, True): None, (True, False): "*", (True, True): "+"}
"""Of arguments, by whether they are a list and whether they are required."""
_CHANNELS = re.compile(r"(\0--(?:mean|std))\0([\d.]+)\0([\d.]+)\0([\d.]+)(?=\0|$)")
"""Three numbers after an option that takes R,G,B."""
_REPEATED = ("leader", "model", "url", "allow")
"""Options that may be repeated: their values are joined by commas."""


OptionsType = TypeVar("OptionsType", bound=Options)


class AsJson(Options):
    """The option --json."""

    as_json: bool = setting(False, names=("--json",))
    """Print JSON instead of text."""


class _ProgramOptions(Options):
    """The options of the programs that are not settings."""

    config: Path | None = setting(None, metavar="FILE")
    """TOML file with settings, in tables such as [serve]; by default that of MULTIWORLD_CONFIG."""
    settings_json: Path | None = setting(None, INTERNAL)
    """All settings as JSON, from the process that starts this one."""
    print_settings: bool = setting(False)
    """Print the settings in effect, without secrets, and exit."""
    help_all: bool = setting(False)
    """Show all options, and exit."""


class _Help(argparse.HelpFormatter):
    """Fills the paragraphs of a docstring, except those with indented lines, which are examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(part if "\n  " in part else fill(part, width, indent) for part in text.split("\n\n"))


class Parser(argparse.ArgumentParser):
    """A parser that raises UserError."""

    def __init__(self, command: str, usage: str, description: str) -> None:
        super().__init__(
            command, f"{command} {usage}", inspect.cleandoc(description), formatter_class=_Help, allow_abbrev=False
        )

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return the values that are given, by the names of their fields."""
        text = _CHANNELS.sub(r"\1\0\2,\3,\4", "\0".join(["", *arguments]))
        found, unknown = self.parse_known_intermixed_args(text.split("\0")[1:])
        if unknown:
            self.error(f"unknown argument {unknown[0]}{nearest(unknown[0], self._option_string_actions)}")
        return {
            name: ",".join(each) if name in _REPEATED and isinstance(each, list) else each
            for name, each in vars(found).items()
        }

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def run_verb(name: str, verb: Callable[[Any], int], arguments: Sequence[str]) -> int:
    """Call a verb with its options, or show its help. Returns the exit status. Raises UserError."""
    parser = parser_of(name, verb, shows_all="--help-all" in arguments)
    if not HELP.isdisjoint(arguments):
        parser.print_help()
        return 0
    cls, given = options_class(verb), parser.parse(arguments)
    return _run_program(verb, cls, given) if issubclass(cls, Settings) else verb(_parsed(cls, given))


def options_class(verb: Callable[[Any], int]) -> Any:
    """The class of a verb's only argument."""
    (parameter,) = inspect.signature(verb).parameters.values()
    return parameter.annotation


def parser_of(name: str, verb: Callable[[Any], int], *, shows_all: bool = True) -> Parser:
    """The parser of a verb, with one option for each field. Values stay strings: the class validates values from every source alike.

    Args:
        shows_all: the help of a program lists also the settings that few people need.
    """
    cls = options_class(verb)
    settings = options_of(cls) if issubclass(cls, Settings) else {}
    fields = _ProgramOptions.model_fields | settings if settings else cls.model_fields
    positionals = [_metavar(*item) for item in fields.items() if extra(item[1])["positional"]]
    parser = Parser(f"multiworld {name}", " ".join(["[options]", *positionals]), verb.__doc__ or "")
    groups: dict[str, Any] = {"Options": parser}
    for dest, field in fields.items():
        kind, heading, is_list = value_type(field), panel(field), get_origin(value_type(field)) is tuple
        is_hidden = heading == INTERNAL or (not shows_all and dest in settings.keys() - _IN_SHORT_HELP)
        how: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS if is_hidden else _help(field)}
        if kind is bool:
            how["action"] = argparse.BooleanOptionalAction if dest in settings else "store_true"
        else:
            how["metavar"] = _metavar(dest, field)
        if extra(field)["positional"]:
            parser.add_argument(dest, nargs=_NARGS[is_list, field.is_required()], **how)
            continue
        if is_list or dest in _REPEATED:
            how["action"] = "append"
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        groups[heading].add_argument(*names_of(dest, field), dest=dest, required=field.is_required(), **how)
    return parser


def names_of(name: str, field: FieldInfo) -> tuple[str, ...]:
    """The names of an option on the command line."""
    return extra(field)["names"] or (option(name),)


def _run_program(program: Callable[[Any], int], cls: type[Settings], given: dict[str, Any]) -> int:
    """Call a program with its settings from all sources. Raises SettingsError."""
    own = _parsed(
        _ProgramOptions, {name: given.pop(name) for name in _ProgramOptions.model_fields.keys() & given.keys()}
    )
    if own.settings_json is not None:
        exit_with_parent()  # also if this process is blocked: otherwise the next service could not use its ports
        settings = cls.model_validate_json(own.settings_json.read_bytes())
    else:
        settings = load(cls, given, config_file=own.config, programs=PROGRAMS).with_token()
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
    """The options as given on the command line, and some in the environment. Raises SettingsError."""
    fields = cls.model_fields
    variables = {name: os.environ.get(variable(name)) for name, field in fields.items() if extra(field)["has_variable"]}
    in_environment = {name: text for name, text in variables.items() if text}
    return validated(cls, in_environment | dict(given), lambda name, text: f"{names_of(name, fields[name])[0]} {text}")


def _help(field: FieldInfo) -> str:
    """Description, allowed values and default; the description of a computed default says what it is."""
    text = " ".join((field.description or "").split())
    kind: Any = value_type(field)
    facts = [", ".join(get_args(kind)) if get_origin(kind) is Literal else "", " ".join(bounds(field))]
    if not (field.is_required() or "default" in text.lower() or (kind is bool and not field.default)):
        facts.append(f"default {default_text(field)}")
    shown = "; ".join(filter(None, facts))
    return (text + (f" ({shown})" if shown else "")).replace("%", "%%")


def _metavar(name: str, field: FieldInfo) -> str:
    if named := extra(field)["metavar"]:
        return str(named)
    if value_type(field) is int and not name.endswith(("_port", "_bytes")):
        return "N"
    last = name.rsplit("_", maxsplit=1)[-1]
    return METAVARS.get(last, last.upper())
