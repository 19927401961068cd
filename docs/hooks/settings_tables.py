"""MkDocs hook: replaces a line `<!-- settings: serve -->` with tables of the settings that the program declares."""

import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from multiworld_serving.cli import options
from multiworld_serving.common.config.settings import Settings, allowed, declaration, fields_of
from multiworld_serving.common.config.sources import option, variable

PROGRAMS: dict[str, type[Settings]] = {cls.section: cls for cls in options.PROGRAMS}
UNITS = {"_s": "seconds", "_bytes": "bytes", "_pixels": "pixels"}
"""Suffix of a setting's name → unit."""
MARKER = re.compile(r"^<!-- settings: (\w+) -->$", re.MULTILINE)
HEAD = ["| setting | default | values | meaning |", "|---|---|---|---|"]


def on_page_markdown(markdown: str, **_: object) -> str:
    return MARKER.sub(lambda marker: tables(PROGRAMS[marker[1]]), markdown)


def tables(cls: type[Settings]) -> str:
    """The settings of a program as Markdown tables, one per panel of `--help`, without hidden settings."""
    shown = [item for item in fields_of(cls).items() if not declaration(item[1])["hidden"]]
    panels = list(dict.fromkeys(_panel(item) for item in shown))
    shown.sort(key=lambda item: panels.index(_panel(item)))  # stable: within a panel as declared
    blocks = []
    for panel, items in groupby(shown, key=_panel):
        blocks.append(
            "\n".join([f"### {panel} of multiworld {cls.section}", "", *HEAD, *(_row(*item) for item in items)])
        )
    return "\n\n".join(blocks)


def _panel(item: tuple[str, FieldInfo]) -> str:
    return str(declaration(item[1])["panel"])


def _row(name: str, field: FieldInfo) -> str:
    names = [option(name)] if declaration(field)["in_argv"] else []
    setting = "<br>".join(f"`{text}`" for text in (*names, variable(name)))
    unit = next((f", in {unit}" for suffix, unit in UNITS.items() if name.endswith(suffix)), "")
    cells = [setting, _default(field), allowed(field) + unit, field.description or ""]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "generated at start"
    default: Any = field.default
    if default in (..., PydanticUndefined):
        return "**required**"
    if default is None:
        return "none"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"
