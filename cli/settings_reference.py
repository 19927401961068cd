"""Generates the reference of all settings: `python -m multiworld_serving.cli.settings_reference > docs/reference/settings.md`."""

from multiworld_serving.cli.options import PROGRAMS, default_text, options_of
from multiworld_serving.common.config.settings import allowed, panel, public_fields
from multiworld_serving.common.config.sources import option, variable

_HEAD = """\
# Settings

`multiworld serve --print-settings` shows the values in effect.

The command line takes precedence over the environment, the environment over the TOML file, and the file over the defaults. Unknown
names are errors. `--config FILE` or `MULTIWORLD_CONFIG` names the file. It has a table for each program. Relative paths start at the
working directory of the program:

```toml
[serve]
stages = 4
[worker]
leader = "10.0.0.1:8001"
```

The environment variable of a setting is `MULTIWORLD_` and its name in capitals, such as `MULTIWORLD_STAGES`. Boolean options have two
forms, such as `--access-log` and `--no-access-log`. Secrets have no option, because options are visible in the process list.
"""
_COLUMNS = "| setting | programs | default | allowed values | meaning |\n|---|---|---|---|---|"


def document() -> str:
    """Return the page as Markdown: one table, in the order of the panels of `--help`."""
    programs: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for cls in PROGRAMS:
        for name, field in public_fields(cls).items():
            setting = option(name) if name in options_of(cls) else variable(name)
            meaning = " ".join((field.description or "").split())
            row = (f"`{setting}`", default_text(field), allowed(field), meaning)
            programs.setdefault(panel(field), {}).setdefault(row, []).append(cls.section)
    rows = [(row[0], ", ".join(found), *row[1:]) for rows in programs.values() for row, found in rows.items()]
    lines = ("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows)
    return "\n".join([_HEAD, _COLUMNS, *lines, ""])


if __name__ == "__main__":
    print(document(), end="")
