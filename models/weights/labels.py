"""Class labels from a file, or placeholders."""

from pathlib import Path

from multiworld_serving.models.errors import LabelsError

MAX_FILE_BYTES = 16 * 2**20
_EXPECTED = "expected UTF-8 text with one label per line"


def read_labels(path: str, num_classes: int) -> tuple[str, ...]:
    """Labels from a file, one per class, in the order of the class ids.

    The file is UTF-8 text with one label per line. Empty lines at the end are ignored.

    Raises:
        LabelsError: the file is missing or malformed, or does not contain exactly `num_classes` labels.
    """
    if path.lower().endswith(".json"):
        raise LabelsError(f"{path} is JSON; {_EXPECTED}")
    labels = _from_lines(_read_text(Path(path)), path)
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
