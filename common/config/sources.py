"""Loads settings: command line over environment over TOML file over defaults. Unknown names are errors.

In a TOML file, each program has a table:

    [serve]
    stages = 4
    [worker]
    leader = "10.0.0.1:8001"

Tables [[models]] list the models of `serve`.
"""

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from multiworld_serving.common.config.errors import SettingsError
from multiworld_serving.common.config.settings import ENV_PREFIX, Settings, allowed, public_fields, value_type

LIBRARY_VARIABLES = ("RUNTIME_DIR", "SHARED_MEMORY_BYTES")
OTHER_VARIABLES = (
    *("CONFIG", "URL", "API_KEY", "API_KEY_FILE", "CA_FILE", "CLIENT_CERT_FILE"),
    *LIBRARY_VARIABLES,
)
"""MULTIWORLD_… variables that are not settings: the TOML file; the URL and credentials of a running service for CLI commands; and those of
the library."""
_OF_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?$")
"""Ends of the variables that Kubernetes sets for a Service called `multiworld…`."""

MODELS = "models"

M = TypeVar("M", bound=BaseModel)
S = TypeVar("S", bound=Settings)


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
    _refuse_unknown_variables(programs)
    path = config_file or os.environ.get(variable("config"))
    content = {} if path is None else _content(Path(path))
    in_file = _table(cls, path, content, programs)
    environment = {name.upper(): text for name, text in os.environ.items() if text}
    in_environment = {name: environment[variable(name)] for name in public_fields(cls) if variable(name) in environment}
    on_command_line = {name: value for name, value in options.items() if value is not None}

    def as_written(name: str, value: object) -> str:
        if name in on_command_line:
            return f"{option(name)} {value}"
        return f"{variable(name)}={value}" if name in in_environment else f"{name} = {value} in {path}"

    if MODELS in cls.model_fields and MODELS in content:
        reload = partial(load, cls, options, config_file=config_file, programs=programs)
        in_file |= {MODELS: content[MODELS], "models_file": path, "reload": reload}
    return validated(cls, {**in_file, **in_environment, **on_command_line}, as_written)


def validated(cls: type[M], values: Mapping[str, Any], as_written: Callable[[str, object], str]) -> M:
    """An object with these values.

    Args:
        as_written: returns name and value as the user wrote them.
    Raises:
        SettingsError: a value is missing or out of bounds.
    """
    try:
        return cls(**values)
    except ValidationError as error:
        # A default that depends on other settings is not computed if any of them is invalid, which is its own error.
        details = (detail for detail in error.errors() if detail["type"] != "default_factory_not_called")
        messages = [_message(cls.model_fields, values, detail, as_written) for detail in details]
        raise SettingsError("; ".join(dict.fromkeys(messages))) from None


def option(name: str) -> str:
    """The command line option of a setting."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + name.upper()


def _refuse_unknown_variables(programs: Iterable[type[Settings]]) -> None:
    """Raise SettingsError for a MULTIWORLD_… variable that no program has: it may be misspelt."""
    known = {variable(name) for names in (*map(public_fields, programs), OTHER_VARIABLES) for name in names}
    for name in sorted(os.environ):
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known and not _OF_KUBERNETES.search(name):
            raise SettingsError(f"unknown environment variable {name}{nearest(name.upper(), known)}")


def _content(path: Path) -> dict[str, Any]:
    """What a TOML file contains. Raises SettingsError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from error


def _table(
    cls: type[Settings], path: object, content: Mapping[str, Any], programs: Sequence[type[Settings]]
) -> dict[str, Any]:
    """The settings of one program in a TOML file, of which all tables are checked."""
    tables = {program.section: public_fields(program) for program in programs}
    for section, table in content.items():
        if section == MODELS:
            continue  # checked with the settings of `serve`
        if section not in tables or not isinstance(table, dict):
            expected = "; settings belong into a table, such as [serve]"
            raise SettingsError(f"unknown table {section} in {path}{nearest(section, tables) or expected}")
        for name, value in table.items():
            if name not in tables[section]:
                raise SettingsError(f"unknown setting {name} in [{section}] in {path}{nearest(name, tables[section])}")
            field = tables[section][name]
            if isinstance(value, str) is (value_type(field) in (int, float, bool)):
                raise SettingsError(f"{name} = {value!r} in [{section}] in {path}: must be {allowed(field)}")
    return dict(content.get(cls.section, {}))


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: a question whether a similar name was meant."""
    close = get_close_matches(name, known, n=1)
    return f": did you mean {close[0]}?" if close else ""


def _message(
    fields: Mapping[str, FieldInfo],
    values: Mapping[str, Any],
    detail: ErrorDetails,
    as_written: Callable[[str, object], str],
) -> str:
    """Message for one pydantic error: the setting as the user wrote it, and what is allowed."""
    if not detail["loc"]:
        return detail["msg"].removeprefix("Value error, ")
    name = str(detail["loc"][0])
    value = "…" if value_type(fields[name]) is SecretStr else values.get(name)
    return f"{as_written(name, value)}: must be {allowed(fields[name])}"
