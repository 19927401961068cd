"""Loads settings: command line over environment over TOML file over defaults. Unknown names are errors.

In a TOML file, the tables `[serve]` and `[worker]` are for one program; a key before the tables applies to every program that has it:

    log_format = "json"             # both
    [serve]
    stages = 4
    [worker]
    leader = "10.0.0.1:8001"
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import SecretStr, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource

from multiworld_serving.common.config.errors import SettingsError
from multiworld_serving.common.config.settings import ENV_PREFIX, Settings, allowed, declaration

OTHER_VARIABLES = (
    *("CONFIG", "URL", "OPERATIONS_URL", "API_KEY", "API_KEY_FILE", "CA_FILE", "CLIENT_CERT_FILE"),
    *("RUNTIME_DIR", "SHARED_MEMORY_BYTES"),
)
"""MULTIWORLD_… variables that are not settings: the TOML file; the URL and credentials of a running service for CLI commands; and those of
the library."""

COMMAND_LINE = "command line"
ENVIRONMENT = "environment"

S = TypeVar("S", bound=Settings)


class Layer(NamedTuple):
    """Values of one source, by field name."""

    origin: str
    values: Mapping[str, Any]


def load(
    cls: type[S],
    options: Mapping[str, object],
    *,
    config_file: Path | None = None,
    programs: Sequence[type[Settings]] = (),
) -> S:
    """Load the settings of one program from all sources.

    Args:
        options: command line values by field name; None counts as not given.
        config_file: TOML file; None uses MULTIWORLD_CONFIG, if set.
        programs: settings of all programs, which share environment and file: their names are not unknown.
    Raises:
        SettingsError: a setting is unknown, missing or out of bounds; named as the user wrote it.
    """
    programs = (cls, *programs)
    refuse_unknown_variables(os.environ, programs)
    named = config_file or os.environ.get(ENV_PREFIX + "CONFIG")
    layers = [
        *([_file_layer(cls, Path(named), programs)] if named else []),
        Layer(ENVIRONMENT, {k: v for k, v in EnvSettingsSource(cls)().items() if not _is_service_link(variable(k), v)}),
        Layer(COMMAND_LINE, {name: value for name, value in options.items() if value is not None}),
    ]
    values, origins = _merge(layers, cls.mutually_exclusive)
    try:
        settings = cls(**values)
    except ValidationError as error:
        # A default that depends on other settings is not computed if any of them is invalid, which is its own error.
        details = (detail for detail in error.errors() if detail["type"] != "default_factory_not_called")
        raise SettingsError("; ".join(_explain(cls, detail, origins) for detail in details)) from None
    settings._origins.update(origins)
    return settings


def option(name: str) -> str:
    """The command line option of a setting."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + name.upper()


def refuse_unknown_variables(environ: Mapping[str, str], programs: Iterable[type[Settings]]) -> None:
    """Raise SettingsError for a MULTIWORLD_… variable that no program has: it may be misspelt."""
    known = {variable(name) for cls in programs for name in cls.model_fields} | {
        ENV_PREFIX + n for n in OTHER_VARIABLES
    }
    for name, value in sorted(environ.items()):
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known and not _is_service_link(name, value):
            raise SettingsError(f"unknown environment variable {name}{_nearest(name.upper(), known)}")


def refuse_unknown_options(options: Iterable[str], cls: type[Settings]) -> None:
    """Raise SettingsError for a setting that this program does not have or that has no option."""
    known = {name for name, field in cls.model_fields.items() if declaration(field)["in_argv"]}
    _refuse_unknown_keys(options, known, f"the command line of multiworld {cls.section}")


def _is_service_link(name: str, value: object) -> bool:
    """Whether Kubernetes set this variable for a Service called `multiworld…`."""
    if re.search(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$", name):
        return True
    return name.endswith("_PORT") and re.match(r"(tcp|udp|sctp)://", str(value)) is not None


def _file_layer(cls: type[Settings], path: Path, programs: Sequence[type[Settings]]) -> Layer:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from error
    tables = {program.section: program for program in programs}
    shared = {key: value for key, value in content.items() if key not in tables}
    _refuse_unknown_keys(shared, {name for p in programs for name in p.model_fields} | tables.keys(), str(path))
    for section, program in tables.items():
        if not isinstance(content.get(section, {}), dict):
            raise SettingsError(f"{section} in {path} must be a table: write [{section}] and its settings below")
        _refuse_unknown_keys(content.get(section, {}), set(program.model_fields), f"[{section}] in {path}")
    own = {key: value for key, value in shared.items() if key in cls.model_fields}
    return Layer(f"file {path}", {**own, **content.get(cls.section, {})})


def _refuse_unknown_keys(keys: Iterable[str], known: set[str], where: str) -> None:
    for key in keys:
        if key not in known:
            raise SettingsError(f"unknown setting {key} in {where}{_nearest(key, known)}")


def _nearest(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f": did you mean {close[0]}?" if close else ""


def _merge(
    layers: Iterable[Layer], mutually_exclusive: Iterable[frozenset[str]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge layers, lowest precedence first. A setting also removes mutually exclusive settings of lower layers."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        for group in mutually_exclusive:
            if len(given := sorted(group & layer.values.keys())) > 1:
                raise SettingsError(f"{' and '.join(given)} are both given ({layer.origin}): give one of them")
            if given:
                values = {name: value for name, value in values.items() if name not in group}
        values |= layer.values
        origins |= dict.fromkeys(layer.values, layer.origin)
    return values, {name: origin for name, origin in origins.items() if name in values}


def _explain(cls: type[Settings], detail: ErrorDetails, origins: Mapping[str, str]) -> str:
    """Message for one pydantic error: the setting as the user wrote it, and what is allowed."""
    if not detail["loc"]:
        return detail["msg"].removeprefix("Value error, ")
    name = str(detail["loc"][0])
    field = cls.model_fields[name]
    if detail["type"] == "missing":
        return f"{option(name)} is missing: {field.description}"
    value = "…" if SecretStr in (field.annotation, *getattr(field.annotation, "__args__", ())) else str(detail["input"])
    return f"{_as_written(name, value, origins.get(name, ''))}: must be {allowed(field)}"


def _as_written(name: str, value: str, origin: str) -> str:
    if origin == COMMAND_LINE:
        return f"{option(name)} {value}"
    if origin == ENVIRONMENT:
        return f"{variable(name)}={value}"
    return f"{name} = {value}" + (f" in {origin}" if origin else "")
