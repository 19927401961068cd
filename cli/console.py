"""Terminal output of the verbs."""

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 240


def console(*, stderr: bool = False) -> "Console":
    """Return a rich console. In a pipe it is wide enough that no line is truncated."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(width=width, highlight=False, stderr=stderr)


def table(*columns: str, numbers: Iterable[str] = (), **style: Any) -> "Table":
    """Return an empty table.

    Args:
        numbers: the columns that are aligned to the right.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, **style)
    for name in columns:
        made.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return made
