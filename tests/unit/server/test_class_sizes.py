"""The classes of the server stay small. Records, settings and metrics are lists of fields, and are not counted."""

import ast
from collections.abc import Iterator
from pathlib import Path

import multiworld_serving.server

MAX_ATTRIBUTES, MAX_METHODS = 12, 20


def attributes(node: ast.ClassDef) -> set[str]:
    """Those that its methods set."""
    stored = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
    return {each.attr for each in stored if isinstance(each.value, ast.Name) and each.value.id == "self"}


def classes() -> Iterator[tuple[str, int, int]]:
    """The name of each class, and its numbers of attributes and methods."""
    folder = Path(multiworld_serving.server.__path__[0])
    for file in (each for each in folder.rglob("*.py") if each.parent.name != "observability"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
                yield node.name, len(attributes(node)), len(methods)


def test_no_class_has_many_attributes_or_methods() -> None:
    found = list(classes())
    assert len(found) > 100
    large = {name for name, of_class, methods in found if of_class > MAX_ATTRIBUTES or methods > MAX_METHODS}
    assert not large
