"""Terminal output of the verbs."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from rich.table import Table

PIPE_WIDTH = 240


def console() -> Console:
    """Return a rich console on standard output. In a pipe it is wide enough that no line is truncated."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(width=width, highlight=False)


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


def progress_console() -> Console:
    """Return a rich console on standard error, for progress output."""
    return Console(stderr=True, highlight=False)


@contextmanager
def progress(what: str, total: int, *, results_at_end: bool = False) -> Iterator[Callable[[], None]]:
    """Show a progress bar on standard error. Yields a function that advances it by one.

    Shown only if standard error is a terminal and standard output is not: results on the terminal show progress themselves.

    Args:
        results_at_end: the block prints no results, so the bar is shown also if standard output is a terminal.
    """
    out = progress_console()
    if not out.is_terminal or (sys.stdout.isatty() and not results_at_end):
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
