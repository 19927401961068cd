"""Label files: every accepted format, and a clear error for every other."""

from pathlib import Path
from typing import Any

import pytest

from multiworld_serving.models.errors import ModelError
from multiworld_serving.models.weights.labels import read_labels


@pytest.mark.parametrize(
    "content",
    ["cat\ndog\nsea cow\n", "\ufeffcat\r\ndog\r\nsea cow\r\n\r\n"],
)
def test_labels_are_read_in_class_order(tmp_path: Path, content: str) -> None:
    path = tmp_path / "labels.txt"
    path.write_bytes(content.encode())
    assert read_labels(str(path), 3) == ("cat", "dog", "sea cow")


@pytest.mark.parametrize(
    ("filename", "content", "message"),
    [
        ("labels.txt", b"cat\ndog\n", "has 2 labels, but the model has 3 classes"),
        ("labels.txt", b"cat\n\ndog\n", "empty line 2"),
        ("labels.txt", b"", "is empty"),
        ("labels.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("labels.json", b'["cat", "dog", "sea cow"]', "is JSON; expected UTF-8 text with one label per line"),
    ],
)
def test_invalid_labels_file_is_refused(tmp_path: Path, filename: str, content: bytes, message: str) -> None:
    path = tmp_path / filename
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_labels(str(path), 3)


@pytest.mark.parametrize("missing", ["nowhere.txt", "."])
def test_missing_labels_file_is_refused(tmp_path: Path, missing: Any) -> None:
    with pytest.raises(ModelError, match="cannot read labels"):
        read_labels(str(tmp_path / missing), 3)
