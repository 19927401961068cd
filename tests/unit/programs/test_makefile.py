"""What the targets of the Makefile install."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(checkout: Path, *arguments: str) -> str:
    return subprocess.run(["make", *arguments], cwd=checkout, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("target", "project"), [("serve", "."), ("test", ".[dev]"), ("install", ".[dev]")])
def test_only_serving_is_installed_without_the_development_tools(checkout: Path, target: str, project: str) -> None:
    assert f'"{project}"' in make(checkout, "--dry-run", target)


def test_nothing_is_installed_for_serving_when_the_development_tools_are(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv/.installed").touch()
    assert make(checkout, ".venv/.serving") == ""
    assert (checkout / ".venv/.serving").exists()
    later_s = (checkout / ".venv/.installed").stat().st_mtime + 10
    os.utime(checkout / "pyproject.toml", (later_s, later_s))
    assert '"$INSTALL"' in make(checkout, "--dry-run", ".venv/.serving")
