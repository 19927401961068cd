"""Text output of the verbs."""

from collections.abc import Container, Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Container[str] = ()) -> str:
    """Return a table of text.

    Args:
        numbers: the columns that are aligned to the right.
    """
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [">" if name in numbers else "<" for name in header]
    cells = ([f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in cells)
