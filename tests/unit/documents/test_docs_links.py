"""Every relative link in the documentation has a target, checked without `make docs`."""

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[3]
NAMED = ("README.md", "multiworld/README.md", "CONTRIBUTING.md", "CHANGELOG.md")
DOCUMENTS = [*(ROOT / name for name in NAMED), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]

CODE = re.compile(
    r"^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)", re.MULTILINE | re.DOTALL
)
FENCED = re.compile(r"^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\[\]]*\]\(\s*<?(?P<target>[^()\s<>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\[[^\[\]]+\]:\s+<?(?P<target>[^\s<>]+)>?", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(?P<title>.+?)\s*#*$", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:")


def links_of(document: Path) -> list[str]:
    """The relative links of a document, without https:, mailto: and so on."""
    text = CODE.sub("", document.read_text(encoding="utf-8"))
    targets = [found["target"] for found in (*LINK.finditer(text), *REFERENCE.finditer(text))]
    return [target for target in targets if not ELSEWHERE.match(target)]


@cache
def anchors(document: Path) -> frozenset[str]:
    """The anchors of its unique headings. GitHub and MkDocs name those of repeated headings differently."""
    names = [anchor(title) for title in HEADING.findall(FENCED.sub("", document.read_text(encoding="utf-8")))]
    return frozenset(name for name in names if names.count(name) == 1)


def anchor(title: str) -> str:
    words = re.sub(r"\[([^\[\]]*)\]\([^()]*\)", r"\1", title)
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", words).strip().lower())


def fault(document: Path, link: str) -> str | None:
    """Description of a link's error; None if it is valid."""
    path, _, name = unquote(link).partition("#")
    target = (document.parent / path).resolve() if path else document
    if not target.is_relative_to(ROOT):
        return "target is outside the repository"
    if not target.exists():
        return "target does not exist"
    if name and (target.suffix != ".md" or name not in anchors(target)):
        return "target has no such heading"
    return None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_links_of_document_have_targets(document: Path) -> None:
    faults = [f"{link}: {wrong}" for link in links_of(document) if (wrong := fault(document, link))]
    assert not faults
