"""The committed reference of settings is what their declarations generate."""

from multiworld_serving.cli import settings_reference
from multiworld_serving.cli.options import PROGRAMS
from multiworld_serving.common.config.settings import public_fields
from tests.documents import ROOT


def test_reference_page_is_up_to_date() -> None:
    path = "docs/reference/settings.md"
    text = (ROOT / path).read_text(encoding="utf-8")
    assert text == settings_reference.document(), f"regenerate it: python -m {settings_reference.__name__} > {path}"


def test_reference_lists_every_setting_with_unit_bounds_and_default() -> None:
    text = settings_reference.document()
    names = {name for cls in PROGRAMS for name in public_fields(cls)}
    assert all(
        f"| `--{name.replace('_', '-')}` |" in text or f"| `MULTIWORLD_{name.upper()}` |" in text for name in names
    )
    assert "| `--timeout-s` | serve, frontend | 30 | a number above 0 up to 3,600 | Timeout of a request" in text
    assert "| `--access-log` | serve, frontend | no | true or false |" in text
    assert "| `MULTIWORLD_TOKEN` | serve, leader, frontend, worker | none | at least one character |" in text
    assert len(names) <= 73
