"""Where settings come from: command line over environment over TOML file over defaults. Unknown names are refused.

In a TOML file, `[serve]` and `[worker]` hold what is meant for one program; a key before the tables is meant for every
program that has it:

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

from config.errors import SettingsError
from config.settings import ENV_PREFIX, Settings, allowed, facts

OTHER_VARIABLES = ("CONFIG", "URL", "OPERATIONS_URL", "API_KEY", "API_KEY_FILE", "CA_FILE", "CLIENT_CERT_FILE")
"""MULTIWORLD_… variables that are no setting: the TOML file, and where a running service is and how to get in, for the verbs."""

COMMAND_LINE = "command line"
ENVIRONMENT = "environment"

S = TypeVar("S", bound=Settings)


class Layer(NamedTuple):
    """What one source says: values by the names of the fields."""

    origin: str
    values: Mapping[str, Any]


def load(
    cls: type[S],
    options: Mapping[str, object],
    *,
    config_file: Path | None = None,
    programs: Sequence[type[Settings]] = (),
) -> S:
    """Gather the settings of one program from all sources.

    Args:
        options: what the command line says, by the names of the fields; None counts as not said.
        config_file: TOML file; None means the one that MULTIWORLD_CONFIG names, if any.
        programs: the settings of all programs, which share environment and file: what is another's is not refused.
    Raises:
        SettingsError: names what is unknown, missing or out of bounds, as the person wrote it.
    """
    programs = (cls, *programs)
    refuse_unknown_variables(os.environ, programs)
    named = config_file or os.environ.get(ENV_PREFIX + "CONFIG")
    layers = [
        *([_file_layer(cls, Path(named), programs)] if named else []),
        Layer(ENVIRONMENT, {k: v for k, v in EnvSettingsSource(cls)().items() if not _is_service_link(variable(k), v)}),
        Layer(COMMAND_LINE, {name: value for name, value in options.items() if value is not None}),
    ]
    values, origins = _merge(layers, cls.rivals)
    try:
        settings = cls(**values)
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(cls, detail, origins) for detail in error.errors())) from None
    settings._origins.update(origins)
    return settings


def option(name: str) -> str:
    """The command line option of a setting."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + name.upper()


def refuse_unknown_variables(environ: Mapping[str, str], programs: Iterable[type[Settings]]) -> None:
    """Raises SettingsError for a MULTIWORLD_… variable that no program knows: it may be a misspelt one."""
    known = {variable(name) for cls in programs for name in cls.model_fields} | {
        ENV_PREFIX + n for n in OTHER_VARIABLES
    }
    for name, value in sorted(environ.items()):
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known and not _is_service_link(name, value):
            raise SettingsError(f"unknown environment variable {name}{_nearest(name.upper(), known)}")


def refuse_unknown_options(options: Iterable[str], cls: type[Settings]) -> None:
    """Raises SettingsError for the name of a setting that this program does not have, or has no option for."""
    known = {name for name, field in cls.model_fields.items() if facts(field)["in_argv"]}
    _refuse_unknown_keys(options, known, f"the command line of multiworld {cls.section}")


def _is_service_link(name: str, value: object) -> bool:
    """Kubernetes tells every pod of a Service called `multiworld…` in variables of these forms: not ours."""
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


def _merge(layers: Iterable[Layer], rivals: Iterable[frozenset[str]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Lay the layers over each other, weakest first. A setting also displaces its rivals of weaker layers."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        for group in rivals:
            if len(given := sorted(group & layer.values.keys())) > 1:
                raise SettingsError(f"{' and '.join(given)} are both given ({layer.origin}): give one of them")
            if given:
                values = {name: value for name, value in values.items() if name not in group}
        values |= layer.values
        origins |= dict.fromkeys(layer.values, layer.origin)
    return values, {name: origin for name, origin in origins.items() if name in values}


def _explain(cls: type[Settings], detail: ErrorDetails, origins: Mapping[str, str]) -> str:
    """One of pydantic's errors in the person's own words: the setting as it was written, and what is allowed."""
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
