"""Runs the code blocks of documentation pages, in order, in one folder."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from multiworld_serving.testing.local_service import LocalService

ROOT = Path(__file__).resolve().parents[1]
BLOCK_TIMEOUT_S = 200.0
_FENCED = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_PROGRAMS = {"js": ("node", "program.js"), "java": ("java", "Program.java")}
"""For each language: what runs a file of it, and the name of the file. Skipped where it is not installed."""


class Block(NamedTuple):
    """A fenced code block."""

    language: str
    code: str


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in a language that is executed."""
    found = _FENCED.finditer(page.read_text(encoding="utf-8"))
    executed = {"sh", "python", *_PROGRAMS}
    return [Block(match["language"], match["code"]) for match in found if match["language"] in executed]


def is_runnable(block: Block) -> bool:
    """Whether this machine has what runs the block."""
    return block.language not in _PROGRAMS or shutil.which(_PROGRAMS[block.language][0]) is not None


def documents() -> list[Path]:
    """README and pages."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass
class PageRunner:
    """Executes the blocks of one page in a folder.

    Args:
        folder: working directory.
        changes: text replacements that make the page faster to run: a smaller model, smaller images.
        service: a running service for the page.
    """

    folder: Path
    changes: Mapping[str, str]
    service: LocalService

    def __post_init__(self) -> None:
        bin_folder = self.folder / ".bin"
        bin_folder.mkdir()
        program = f'#!/bin/sh\nexec "{sys.executable}" -P -m multiworld_serving.cli.main "$@"\n'
        for name, text in {"multiworld": program, "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'}.items():
            (bin_folder / name).write_text(text)
            (bin_folder / name).chmod(0o755)

    def run(self, block: Block) -> str:
        """Execute a block and return its output. Raises AssertionError if it fails."""
        code = self._replace(block.code)
        if block.language in _PROGRAMS:
            program, file = _PROGRAMS[block.language]
            (self.folder / file).write_text(code)
            command = [program, file]
        elif block.language == "python":
            command = [sys.executable, "-c", code]
        else:
            command = ["bash", "-euo", "pipefail", "-c", code]
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment(), capture_output=True, timeout=BLOCK_TIMEOUT_S, check=False
        )
        output = f"{code}\n{done.stdout!r}\n{done.stderr.decode(errors='replace')}"
        assert done.returncode == 0, output
        assert b'"error"' not in done.stdout, output
        return done.stdout.decode(errors="replace")

    def _replace(self, code: str) -> str:
        for old, new in self.changes.items():
            code = code.replace(old, new)
        for port, url in {"8000": self.service.url, "8002": self.service.metrics_url.removesuffix("/metrics")}.items():
            code = code.replace(f"http://127.0.0.1:{port}", url)
            code = code.replace(f"127.0.0.1:{port}", url.partition("//")[2])
        return code.replace("127.0.0.1:8005", self.service.grpc_address or "")

    def _environment(self) -> dict[str, str]:
        path = f"{self.folder / '.bin'}{os.pathsep}{os.environ['PATH']}"
        known = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return {**os.environ, "MULTIWORLD_URL": self.service.url, "PATH": path, "PYTHONPATH": known}


def settings_of(options: list[str]) -> Iterator[tuple[str, str]]:
    """Names and values for `LocalService`."""
    names = iter(options)
    for name in names:
        yield name.removeprefix("--").replace("-", "_"), next(names)
