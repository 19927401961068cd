"""MkDocs hook: adds Markdown files from outside docs/ to the site, without copies.

Links are relative paths in the repository, so that they also work on GitHub. This hook rewrites each to the page of its target. A link to a
file without a page is replaced by its text. It also adds the blank line before lists that Python-Markdown needs and GitHub does not.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).resolve().parents[2]
DECISIONS = "decisions/index.md"
PAGES = {
    "README.md": "service.md",
    "multiworld/README.md": "library.md",
    "examples/README.md": "examples/index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Path in the repository → path on the site."""
LINK = re.compile(r"\[(?P<text>[^\[\]]*)\]\((?P<path>[^()\s#:]+)(?P<anchor>#[^()\s]*)?\)")

FENCED = re.compile(r"(^(`{3,}|~{3,}).*?^\2[^\n]*$)", re.MULTILINE | re.DOTALL)
LIST_AFTER_TEXT = re.compile(r"^(?![-*] |\d+\. |\s)(.+)\n(?=[-*] |1\. )", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the empty lists of the navigation with the files that exist."""
    parts = {
        "Examples": [path for path in _pages().values() if path.startswith("examples/")],
        "Decisions": [DECISIONS, *(f"decisions/{path.name}" for path in _decisions())],
    }
    config.nav = [_filled(entry, parts) for entry in config.nav or []]
    return config


def _filled(entry: Any, parts: dict[str, list[str]]) -> Any:
    return {name: parts.get(name, value) for name, value in entry.items()} if isinstance(entry, dict) else entry


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for repository_path, site_path in _pages().items():
        files.append(File.generated(config, site_path, abs_src_path=str(ROOT / repository_path)))
    files.append(File.generated(config, DECISIONS, content=_list_of_decisions()))
    files.append(File.generated(config, "assets/pygments.css", content=HtmlFormatter().get_style_defs(".highlight")))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    origins = {site_path: repository_path for repository_path, site_path in _pages().items()}
    here = page.file.src_uri
    folder = os.path.dirname(origins.get(here, f"docs/{here}"))

    def rewritten(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(folder, link["path"]))
        if not (ROOT / target).exists():
            return link[0]  # not a link, or a broken one, which MkDocs reports
        site_path = _site_path(target)
        if files.get_file_from_path(site_path) is None:
            return link["text"]
        return f"[{link['text']}]({os.path.relpath(site_path, os.path.dirname(here) or '.')}{link['anchor'] or ''})"

    pieces = FENCED.split(markdown)
    pieces[::3] = [LINK.sub(rewritten, LIST_AFTER_TEXT.sub(r"\1\n\n", text)) for text in pieces[::3]]
    del pieces[2::3]  # the fence strings
    return "".join(pieces)


def _pages() -> dict[str, str]:
    examples = {f"examples/{path.parent.name}/README.md": f"examples/{path.parent.name}.md" for path in _examples()}
    return PAGES | examples


def _examples() -> list[Path]:
    return sorted(ROOT.glob("examples/*/README.md"))


def _decisions() -> list[Path]:
    return sorted(ROOT.glob("docs/decisions/[0-9]*.md"))


def _list_of_decisions() -> str:
    titles = {path.name: path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for path in _decisions()}
    lines = [f"- [{title}]({name})" for name, title in titles.items()]
    return "\n".join(["# Decisions", "", "Decisions, their reasons, and the alternatives.", "", *lines, ""])


def _site_path(repository_path: str) -> str:
    """Path on the site of a file or folder of the repository; "" if it has none."""
    pages = _pages()
    if repository_path == "docs/decisions":
        return DECISIONS
    for path in (repository_path, f"{repository_path}/README.md"):
        if path in pages:
            return pages[path]
    return repository_path.removeprefix("docs/") if repository_path.startswith("docs/") else ""
