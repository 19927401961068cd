"""The settings tables of the documentation, which are generated from the declarations."""

import pytest

from docs.hooks.settings_tables import PROGRAMS, on_page_markdown, tables
from multiworld_serving.common.config import Settings
from multiworld_serving.common.config.settings import declaration
from multiworld_serving.common.config.sources import option, variable


@pytest.mark.parametrize("cls", PROGRAMS.values(), ids=PROGRAMS)
def test_settings_tables_contain_every_setting_shown_in_help(cls: type[Settings]) -> None:
    rows = {row.split(" | ")[0] for row in tables(cls).splitlines()}
    for name, field in cls.model_fields.items():
        shown = (
            f"| `{option(name)}`<br>`{variable(name)}`" if declaration(field)["in_argv"] else f"| `{variable(name)}`"
        )
        assert (shown in rows) is not declaration(field)["hidden"], name


def test_settings_tables_contain_unit_bounds_and_default() -> None:
    text = tables(PROGRAMS["serve"])
    assert "`MULTIWORLD_TIMEOUT_S` | `30.0` | a number above 0 up to 3,600, in seconds | Timeout of a request" in text
    assert "`MULTIWORLD_ACCESS_LOG` | `false` | true or false |" in text
    assert "`MULTIWORLD_TOKEN` | none | at least one character |" in text
    assert "`MULTIWORLD_LEADER` | none | HOST:PORT" in tables(PROGRAMS["worker"])


def test_marker_is_replaced_by_tables() -> None:
    page = on_page_markdown("before\n\n<!-- settings: worker -->\n\nafter")
    assert page == f"before\n\n{tables(PROGRAMS['worker'])}\n\nafter"
