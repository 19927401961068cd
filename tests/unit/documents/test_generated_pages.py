"""The committed reference of settings is what their declarations generate."""

from multiworld_serving.cli import settings_reference
from multiworld_serving.cli.options import PROGRAMS
from multiworld_serving.common.config.settings import public_fields
from tests.documents import ROOT


def test_reference_page_is_up_to_date() -> None:
    path = "docs/reference/settings.md"
    text = (ROOT / path).read_text(encoding="utf-8")
    assert text == settings_reference.document(), f"regenerate it: python -m {settings_reference.__name__} > {path}"
    assert len({name for cls in PROGRAMS for name in public_fields(cls)}) <= 73
