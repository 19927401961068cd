"""The pages of the documentation as what they are for: commands that somebody types, one after the other, in one folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from deploy.service import LocalService

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 100.0
_FENCED = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_SERVE = re.compile(r"multiworld serve\b(?P<options>.*)")


class Block(NamedTuple):
    """What stands between two fences."""

    language: str
    code: str


def blocks(page: Path) -> list[Block]:
    """Those of a page that are to be run: shell and Python."""
    found = _FENCED.finditer(page.read_text(encoding="utf-8"))
    return [Block(match["language"], match["code"]) for match in found if match["language"] in ("sh", "python")]


def documents() -> list[Path]:
    """Every page that is read by people."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "guides").glob("*.md"))]


@dataclass
class Reader:
    """Somebody who follows a page to the letter, in a folder of their own. Use as a context.

    Args:
        folder: where they are.
        changes: what they read otherwise than it stands there, so that it takes seconds and not minutes: a smaller model, smaller pictures.
        service: the one that they have started before they came to this page; None when the page says how.
    """

    folder: Path
    changes: Mapping[str, str]
    service: LocalService | None = None

    def __post_init__(self) -> None:
        self._running = ExitStack()
        bin_folder = self.folder / ".bin"
        bin_folder.mkdir()
        program = f'#!/bin/sh\nexec "{sys.executable}" -P -m cli.main "$@"\n'
        for name, text in {"multiworld": program, "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'}.items():
            (bin_folder / name).write_text(text)
            (bin_folder / name).chmod(0o755)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def follow(self, block: Block) -> str:
        """Do what a block says; gives what it prints. Raises AssertionError when it fails."""
        code = self._read(block.code)
        if block.language == "sh" and (serve := _SERVE.fullmatch(code.strip())):
            self._serve(serve["options"])
            return ""
        command = (
            [sys.executable, "-c", code] if block.language == "python" else ["bash", "-euo", "pipefail", "-c", code]
        )
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment(), capture_output=True, timeout=PATIENCE_S, check=False
        )
        said = f"{code}\n{done.stdout!r}\n{done.stderr.decode(errors='replace')}"
        assert done.returncode == 0, said
        assert b'"error"' not in done.stdout, said
        return done.stdout.decode(errors="replace")

    def _read(self, code: str) -> str:
        for there, here in self.changes.items():
            code = code.replace(there, here)
        if self.service is not None:
            for port, url in {
                "8000": self.service.url,
                "8002": self.service.metrics_url.removesuffix("/metrics"),
            }.items():
                code = code.replace(f"http://127.0.0.1:{port}", url)
                code = code.replace(f"127.0.0.1:{port}", url.partition("//")[2])
        return code

    def _serve(self, options: str) -> None:
        """Start what is to be started, on free ports; what was started before on this page ends."""
        self._running.close()
        settings: dict[str, Any] = dict(_settings(shlex.split(options)))
        settings.setdefault("heartbeat_timeout_s", "10")  # however busy the machine is, nobody counts as frozen
        for name in ("weights", "labels", "weights_dir"):
            if name in settings and (self.folder / settings[name]).exists():
                settings[name] = str(self.folder / settings[name])
        self.service = self._running.enter_context(LocalService(**settings))

    def _environment(self) -> dict[str, str]:
        urls = {}
        if self.service is not None:
            operations = self.service.metrics_url.removesuffix("/metrics")
            urls = {"MULTIWORLD_URL": self.service.url, "MULTIWORLD_OPERATIONS_URL": operations}
        path = f"{self.folder / '.bin'}{os.pathsep}{os.environ['PATH']}"
        known = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return {**os.environ, **urls, "PATH": path, "PYTHONPATH": known}


def _settings(options: list[str]) -> Iterator[tuple[str, str]]:
    """Names and values, as `LocalService` takes them."""
    names = iter(options)
    for name in names:
        yield name.removeprefix("--").replace("-", "_"), next(names)
