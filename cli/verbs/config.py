"""`multiworld config` and `multiworld version`: show the effective settings, and the installed versions."""

import json
import platform
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import version as installed
from pathlib import Path
from typing import Annotated

import typer

from multiworld_serving.cli.options import PROGRAMS, AsJson, assignments, flag, value
from multiworld_serving.common.config import Settings, load
from multiworld_serving.common.config.settings import allowed, declaration, effective_settings, fields_of
from multiworld_serving.common.config.sources import option, refuse_unknown_options, variable
from multiworld_serving.server.leader_settings import LeaderSettings
from multiworld_serving.server.settings import HttpSettings

EPILOG = """
[bold]Examples[/bold]

multiworld config

multiworld config --config service.toml --changed

MULTIWORLD_STAGES=3 multiworld config serve --set replicas=4 --json
"""

_BY_SECTION = {cls.section: cls for cls in PROGRAMS}
Program = Enum("Program", {section: section for section in _BY_SECTION})  # type: ignore[misc]

Of = Annotated[
    Program,
    typer.Argument(
        metavar="[serve|leader|frontend|worker]", help="Program whose settings are shown.", show_default="serve"
    ),
]
ConfigFile = Annotated[
    Path | None,
    value("FILE", "TOML file with settings, as for the program.", "--config", envvar="MULTIWORLD_CONFIG"),
]
Sets = Annotated[
    list[str] | None,
    value("NAME=VALUE", "Value of a command line option of the program; may be repeated.", "--set"),
]
Changed = Annotated[bool, flag("--changed", "Show only settings that differ from the default.")]


@dataclass(frozen=True)
class _Line:
    name: str
    value: str
    origin: str
    option: str | None
    variable: str
    allowed: str
    meaning: str


def config(
    program: Of = Program("serve"),  # noqa: B008 - typer needs the member as default
    config_file: ConfigFile = None,
    sets: Sets = None,
    changed: Changed = False,
    as_json: AsJson = False,
) -> int:
    """Print the effective settings of a program and the source of each. Secrets are masked.

    The command line takes precedence over the environment, then the TOML file, then the defaults. Invalid settings, missing files and
    unknown models are rejected as the program rejects them, so this command can check a file before the service is started. It does
    not load the model, and does not check ports and devices.
    """
    cls = _BY_SECTION[program.value]
    options = assignments(sets)
    refuse_unknown_options(options, cls)
    settings = load(cls, options, config_file=config_file, programs=PROGRAMS)
    _check(settings)
    lines = [line for line in _lines(settings) if not changed or line.origin != "default"]
    if as_json:
        print(json.dumps([asdict(line) for line in lines], indent=1))
    else:
        _show(lines)
    return 0


def _check(settings: Settings) -> None:
    """Raise UserError or ModelError if the program would end with it because of a file or a name, without loading the model."""
    settings.with_token()
    if isinstance(settings, LeaderSettings):
        # Importing it takes seconds.
        from multiworld_serving.server.versions.model_source import check_model_source

        check_model_source(settings)
    if isinstance(settings, HttpSettings):
        from multiworld_serving.server.api.handler.processes import HandlerProcesses
        from multiworld_serving.server.auth.credential_reloader import read_credentials

        read_credentials(settings)
        if settings.handler is not None:
            with HandlerProcesses(settings.handler, settings.handler_timeout_s):
                pass


def _lines(settings: Settings) -> list[_Line]:
    fields = fields_of(type(settings))
    return [
        _Line(
            *row,
            option=option(row.name) if declaration(fields[row.name])["in_argv"] else None,
            variable=variable(row.name),
            allowed=allowed(fields[row.name]),
            meaning=fields[row.name].description or "",
        )
        for row in effective_settings(settings)
        if not declaration(fields[row.name])["hidden"]
    ]


def _show(lines: list[_Line]) -> None:
    from rich.text import Text

    from multiworld_serving.cli.console import console, table

    rows = table("setting", "value", "source", "allowed")
    for line in lines:
        style = "" if line.origin == "default" else "bold"
        rows.add_row(
            Text(line.name, style=style),
            Text(line.value, style=style),
            Text(line.origin),
            Text(line.allowed, style="dim"),
        )
    console().print(rows)


def version(as_json: AsJson = False) -> int:
    """Print the versions of multiworld, Python, torch and torchvision."""
    versions = {
        "multiworld": installed("multiworld-serving"),
        "python": platform.python_version(),
        "torch": installed("torch"),
        "torchvision": installed("torchvision"),
    }
    print(json.dumps(versions) if as_json else "\n".join(f"{name} {number}" for name, number in versions.items()))
    return 0
