"""Modules are short, folders have few modules, and no modules import each other in a cycle."""

import ast
from collections import Counter
from collections.abc import Iterator
from glob import glob
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.documents import ROOT

MAX_LINES = 400
MAX_MODULES = 12
"""In a folder, without `__init__.py`."""
PACKAGES = ("multiworld", "multiworld_client", "multiworld_serving")


def name_of(file: str) -> str:
    """The name of a module, such as `multiworld.elastic` of multiworld/elastic/__init__.py."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


# `glob.glob` follows the links of multiworld_serving, Path.rglob of Python 3.11 does not.
MODULES = {name_of(file): file for each in PACKAGES for file in glob(f"{each}/**/*.py", root_dir=ROOT, recursive=True)}
SOURCES = {name: (ROOT / file).read_text(encoding="utf-8") for name, file in MODULES.items()}


def imported(source: str) -> Iterator[str]:
    """The modules that a module imports anywhere, also in functions and for type checkers only."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (each.name for each in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                inner = [f"{module}.{each.name}" for each in names]
                yield from (name if name in MODULES else module for name in inner)


def test_modules_have_at_most_400_lines() -> None:
    lines = {name: len(source.splitlines()) for name, source in SOURCES.items()}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_folders_have_at_most_12_modules() -> None:
    sizes = Counter(file.rpartition("/")[0] for file in MODULES.values() if not file.endswith("/__init__.py"))
    assert {folder: count for folder, count in sizes.items() if count > MAX_MODULES} == {}


def test_modules_do_not_import_each_other_in_a_cycle() -> None:
    graph = {name: {*imported(source)} & MODULES.keys() - {name} for name, source in SOURCES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
