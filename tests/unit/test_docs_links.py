"""Every link in the documentation leads to something that is there, wherever the files are read; `make docs` is not needed."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = ("README.md", "multiworld/README.md", "CONTRIBUTING.md", "CHANGELOG.md")
DOCUMENTS = sorted(
    {*(ROOT / name for name in NAMED), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")},
)

CODE = re.compile(
    r"^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)", re.MULTILINE | re.DOTALL
)
FENCED = re.compile(r"^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\[\]]*\]\(\s*<?(?P<target>[^()\s<>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\[[^\[\]]+\]:\s+<?(?P<target>[^\s<>]+)>?", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(?P<title>.+?)\s*#*$", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:")


class Link(NamedTuple):
    document: Path
    target: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)} -> {self.target}"


def links_of(document: Path) -> Iterator[Link]:
    """The links of a document that do not lead elsewhere (https:, mailto:)."""
    text = CODE.sub("", document.read_text(encoding="utf-8"))
    for found in (*LINK.finditer(text), *REFERENCE.finditer(text)):
        if not ELSEWHERE.match(found["target"]):
            yield Link(document, found["target"])


@cache
def anchors(document: Path) -> frozenset[str]:
    """The names of its headings, as GitHub and MkDocs make them: a title that comes again is not told apart by both alike."""
    titles = HEADING.findall(FENCED.sub("", document.read_text(encoding="utf-8")))
    names = Counter(anchor(title) for title in titles)
    return frozenset(name for name, times in names.items() if times == 1)


def anchor(title: str) -> str:
    words = re.sub(r"\[([^\[\]]*)\]\([^()]*\)", r"\1", title)
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", words).strip().lower())


def fault(link: Link) -> str | None:
    """What is wrong with a link; None when nothing is."""
    path, _, name = unquote(link.target).partition("#")
    target = (link.document.parent / path).resolve() if path else link.document
    if not target.is_relative_to(ROOT):
        return "leads out of the repository"
    if not target.exists():
        return "is not there"
    if name and (target.suffix != ".md" or name not in anchors(target)):
        return "has no heading of that name"
    return None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    faults = [f"{link} {wrong}" for link in links_of(document) if (wrong := fault(link))]
    assert not faults


def test_links_are_found() -> None:
    links = {str(link) for document in DOCUMENTS for link in links_of(document)}
    assert "README.md -> docs/chaos.md" in links
    assert "multiworld/README.md -> #coming-from-torchdistributed" in links


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](there.md)", None),
        ("[a](there.md#a-heading-of-it)", None),
        ("[a](#here)\n\n## Here", None),
        ("[a](gone.md)", "is not there"),
        ("[a](there.md#gone)", "has no heading of that name"),
        ("[a](there.md#in-a-block)", "has no heading of that name"),
        ("[a](there.md#twice)", "has no heading of that name"),
        ("[a](#gone)", "has no heading of that name"),
        ("[a](../outside.md)", "leads out of the repository"),
        ("[a]: gone.md", "is not there"),
        ("`[a](gone.md)`", "no link"),
        ("```\n[a](gone.md)\n```", "no link"),
        ("[a](https://example.org/gone.md#gone)", "no link"),
    ],
)
def test_fault_is_told_when_a_link_is_broken(
    text: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    there = "# There\n\n## A heading, of `it`\n\n## Twice\n\n## Twice\n\n```\n# In a block\n```\n"
    (tmp_path / "there.md").write_text(there, encoding="utf-8")
    document = tmp_path / "document.md"
    document.write_text(text, encoding="utf-8")
    assert [fault(link) for link in links_of(document)] == ([] if expected == "no link" else [expected])
