"""Runs the code blocks of documentation pages, in order, in one folder."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from multiworld_serving.testing.local_service import LocalService

ROOT = Path(__file__).resolve().parents[1]
BLOCK_TIMEOUT_S = 200.0
_FENCED = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_PROGRAMS = {"js": ("node", "program.js"), "java": ("java", "Program.java")}
"""For each language: what runs a file of it, and the name of the file. Skipped where it is not installed."""
_SERVE = re.compile(r"multiworld serve\b(?P<options>.*)")


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
    """Executes the blocks of one page in a folder. Use as a context manager.

    Args:
        folder: working directory.
        changes: text replacements that make the page faster to run: a smaller model, smaller images.
        service: a running service for the page; None if the page starts one.
    """

    folder: Path
    changes: Mapping[str, str]
    service: LocalService | None = None

    def __post_init__(self) -> None:
        self._running = ExitStack()
        bin_folder = self.folder / ".bin"
        bin_folder.mkdir()
        program = f'#!/bin/sh\nexec "{sys.executable}" -P -m multiworld_serving.cli.main "$@"\n'
        for name, text in {"multiworld": program, "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'}.items():
            (bin_folder / name).write_text(text)
            (bin_folder / name).chmod(0o755)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def run(self, block: Block) -> str:
        """Execute a block and return its output. Raises AssertionError if it fails."""
        code = self._replace(block.code)
        if block.language == "sh" and (serve := _SERVE.fullmatch(code.strip())):
            self._serve(serve["options"])
            return ""
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
        if self.service is not None:
            for port, url in {
                "8000": self.service.url,
                "8002": self.service.metrics_url.removesuffix("/metrics"),
            }.items():
                code = code.replace(f"http://127.0.0.1:{port}", url)
                code = code.replace(f"127.0.0.1:{port}", url.partition("//")[2])
            if self.service.grpc_address is not None:
                code = code.replace("127.0.0.1:8005", self.service.grpc_address)
        return code

    def _serve(self, options: str) -> None:
        """Start the page's service on free ports, after stopping the previous one."""
        self._running.close()
        settings: dict[str, Any] = dict(settings_of(shlex.split(options)))
        settings.setdefault("heartbeat_timeout_s", "10")  # no false detection on a busy machine
        for name in ("model", "weights", "weights_dir"):
            if name in settings and (self.folder / settings[name]).exists():
                settings[name] = str(self.folder / settings[name])
        self.service = self._running.enter_context(LocalService(**settings))

    def _environment(self) -> dict[str, str]:
        urls = {}
        if self.service is not None:
            urls = {"MULTIWORLD_URL": self.service.url}
        path = f"{self.folder / '.bin'}{os.pathsep}{os.environ['PATH']}"
        known = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return {**os.environ, **urls, "PATH": path, "PYTHONPATH": known}


def settings_of(options: list[str]) -> Iterator[tuple[str, str]]:
    """Names and values for `LocalService`."""
    names = iter(options)
    for name in names:
        yield name.removeprefix("--").replace("-", "_"), next(names)
