"""Class labels from a file, or placeholders."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from multiworld_serving.models.errors import LabelsError

MAX_FILE_BYTES = 16 * 2**20
_EXPECTED = (
    'expected one label per line, or JSON: a list, or an object from index to label such as {"0": "cat", "1": "dog"}'
)
_Entry = str | Annotated[list[str], Meta(min_length=1)]
"""A label, or a list that ends in it, as in the usual ImageNet index."""


def read_labels(path: str, num_classes: int) -> tuple[str, ...]:
    """Labels from a file, one per class, in the order of the class ids.

    A `.json` file contains a list, or an object from index to label (or to a list that ends in the label, as in the usual ImageNet index).
    Any other file is UTF-8 text with one label per line; empty lines at the end are ignored.

    Raises:
        LabelsError: the file is missing or malformed, or does not contain exactly `num_classes` labels.
    """
    text = _read_text(Path(path))
    labels = _from_json(text, path) if path.lower().endswith(".json") else _from_lines(text, path)
    if len(labels) != num_classes:
        raise LabelsError(
            f"{path} has {len(labels)} labels, but the model has {num_classes} classes; expected one label per class"
        )
    return labels


def placeholder_labels(num_classes: int) -> tuple[str, ...]:
    """ "class_0", "class_1", ...: for a model without labels."""
    return tuple(f"class_{i}" for i in range(num_classes))


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise LabelsError(
                f"{path} is larger than {MAX_FILE_BYTES} bytes, so it is not a file of labels; {_EXPECTED}"
            )
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise LabelsError(f"cannot read labels from {path}: {error.strerror or error}; check the path") from error
    except UnicodeDecodeError as error:
        raise LabelsError(f"{path} is not UTF-8 text; {_EXPECTED}") from error


def _from_lines(text: str, path: str) -> tuple[str, ...]:
    lines = [line.strip() for line in text.rstrip().split("\n")]
    for number, line in enumerate(lines, start=1):
        if not line:
            raise LabelsError(f"{path} is empty, or has an empty line {number} among its labels; {_EXPECTED}")
    return tuple(lines)


def _from_json(text: str, path: str) -> tuple[str, ...]:
    try:
        data = msgspec.json.decode(text, type=list[_Entry] | dict[str, _Entry])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise LabelsError(f"{path} is not JSON of labels ({error}); {_EXPECTED}") from error
    if isinstance(data, dict):
        if strange := sorted(data.keys() - {str(index) for index in range(len(data))}):
            raise LabelsError(
                f"{path} has the key {strange[0]!r}; expected the indices 0 to {len(data) - 1}, each once"
            )
        data = [data[str(index)] for index in range(len(data))]
    labels = tuple((entry if isinstance(entry, str) else entry[-1]).strip() for entry in data)
    if "" in labels:
        raise LabelsError(f"{path} has an empty label at index {labels.index('')}; expected text")
    return labels
