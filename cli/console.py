"""What verbs print for people."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

PIPE_WIDTH = 240


def console() -> Console:
    """Standard output as a rich console: as wide as the terminal, and in a pipe wide enough that nothing is cut off."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(width=width, highlight=False)


def progress_console() -> Console:
    """Standard error as a rich console: for what goes as it came, so that standard output holds nothing but results."""
    return Console(stderr=True, highlight=False)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error that each call of what this gives moves on by one.

    Only where standard error is a terminal and standard output is none: results that go to the terminal are progress enough.
    """
    out = progress_console()
    if not out.is_terminal or sys.stdout.isatty():
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
