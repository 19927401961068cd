"""`multiworld config`: the settings that a program would have, and where each comes from."""

import json
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.options import PROGRAMS
from cli.service import AsJson
from config import Settings, load
from config.settings import allowed, effective, facts, fields_of
from config.sources import option, refuse_unknown_options, variable

EPILOG = """
[bold]Examples[/bold]

multiworld config

multiworld config --config service.toml --changed

MULTIWORLD_STAGES=3 multiworld config serve --set replicas=4 --json
"""

_BY_SECTION = {cls.section: cls for cls in PROGRAMS}
Program = Enum("Program", {section: section for section in _BY_SECTION})  # type: ignore[misc]

Of = Annotated[Program, typer.Argument(metavar="[serve|worker]", help="The program.", show_default="serve")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", envvar="MULTIWORLD_CONFIG", metavar="FILE", help="TOML file, as the program takes it."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="What the command line of the program would say; may be repeated."
    ),
]
Changed = Annotated[bool, typer.Option("--changed", help="Only what is not the default.")]


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
    program: Of = Program("serve"),  # noqa: B008 - typer's way of a default
    config_file: ConfigFile = None,
    sets: Sets = None,
    changed: Changed = False,
    as_json: AsJson = False,
) -> int:
    """Print the settings that a program would have here and now: each with where it comes from, secrets masked.

    The command line wins over the environment, that over the TOML file, that over the defaults. What cannot be used is
    refused as the program would refuse it: so this checks a file before a service is started with it.
    """
    cls = _BY_SECTION[program.value]
    options = dict(_pair(text) for text in sets or [])
    refuse_unknown_options(options, cls)
    settings = load(cls, options, config_file=config_file, programs=PROGRAMS)
    lines = [line for line in _lines(settings) if not changed or line.origin != "default"]
    if as_json:
        print(json.dumps([asdict(line) for line in lines], indent=1))
    else:
        _show(lines)
    return 0


def _pair(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name.strip().removeprefix("--").replace("-", "_"), value.strip()


def _lines(settings: Settings) -> list[_Line]:
    fields = fields_of(type(settings))
    return [
        _Line(
            *row,
            option=option(row.name) if facts(fields[row.name])["in_argv"] else None,
            variable=variable(row.name),
            allowed=allowed(fields[row.name]),
            meaning=fields[row.name].description or "",
        )
        for row in effective(settings)
        if not facts(fields[row.name])["hidden"]
    ]


def _show(lines: list[_Line]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from cli.console import console

    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("setting", "value", "from", "may be"):
        table.add_column(name, overflow="fold")
    for line in lines:
        style = "" if line.origin == "default" else "bold"
        table.add_row(
            Text(line.name, style=style),
            Text(line.value, style=style),
            Text(line.origin),
            Text(line.allowed, style="dim"),
        )
    console().print(table)
