"""The committed reference pages are what the declarations of options and settings generate."""

import pytest

from multiworld_serving.cli import settings_reference
from multiworld_serving.cli.options import PROGRAMS
from multiworld_serving.cli.settings_reference import tables
from multiworld_serving.common.config import Settings
from multiworld_serving.common.config.settings import declaration
from multiworld_serving.common.config.sources import option, variable
from multiworld_serving.server.settings import ServeSettings
from multiworld_serving.workers.settings import WorkerSettings
from tests.documents import ROOT


def test_reference_page_is_up_to_date() -> None:
    path = "docs/reference/settings.md"
    text = (ROOT / path).read_text(encoding="utf-8")
    assert text == settings_reference.document(), f"regenerate it: python -m {settings_reference.__name__} > {path}"


@pytest.mark.parametrize("cls", PROGRAMS, ids=lambda cls: cls.section)
def test_settings_tables_contain_every_setting_shown_in_help(cls: type[Settings]) -> None:
    rows = {row.split(" | ")[0] for row in tables(cls).splitlines()}
    for name, field in cls.model_fields.items():
        shown = (
            f"| `{option(name)}`<br>`{variable(name)}`" if declaration(field)["in_argv"] else f"| `{variable(name)}`"
        )
        assert (shown in rows) is not declaration(field)["hidden"], name


def test_settings_tables_contain_unit_bounds_and_default() -> None:
    text = tables(ServeSettings)
    assert "`MULTIWORLD_TIMEOUT_S` | `30.0` | a number above 0 up to 3,600, in seconds | Timeout of a request" in text
    assert "`MULTIWORLD_ACCESS_LOG` | `false` | true or false |" in text
    assert "`MULTIWORLD_TOKEN` | none | at least one character |" in text
    assert "`MULTIWORLD_LEADER` | none | HOST:PORT" in tables(WorkerSettings)
