"""The tables of settings in the documentation, which are made from where settings are declared."""

import pytest

from config import Settings
from config.settings import facts
from config.sources import option, variable
from docs.hooks.settings_tables import PROGRAMS, on_page_markdown, tables


@pytest.mark.parametrize("cls", PROGRAMS.values(), ids=PROGRAMS)
def test_tables_have_every_setting_that_help_shows(cls: type[Settings]) -> None:
    rows = {row.split(" | ")[0] for row in tables(cls).splitlines()}
    for name, field in cls.model_fields.items():
        shown = f"| `{option(name)}`<br>`{variable(name)}`" if facts(field)["in_argv"] else f"| `{variable(name)}`"
        assert (shown in rows) is not facts(field)["hidden"], name


def test_tables_say_unit_bounds_and_default() -> None:
    text = tables(PROGRAMS["serve"])
    assert (
        "`MULTIWORLD_TIMEOUT_S` | `30.0` | a number above 0 up to 3,600, in seconds | Longest time for one request"
        in text
    )
    assert "`MULTIWORLD_ACCESS_LOG` | `false` | true or false |" in text
    assert "`MULTIWORLD_TOKEN` | none | at least one character |" in text
    assert "`MULTIWORLD_LEADER` | **must be given** | HOST:PORT" in tables(PROGRAMS["worker"])


def test_page_gets_its_tables_where_it_is_marked() -> None:
    page = on_page_markdown("before\n\n<!-- settings: worker -->\n\nafter")
    assert page == f"before\n\n{tables(PROGRAMS['worker'])}\n\nafter"
