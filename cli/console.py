"""What verbs print for people."""

import os
import sys

from rich.console import Console

PIPE_WIDTH = 240


def console() -> Console:
    """Standard output as a rich console: as wide as the terminal, and in a pipe wide enough that nothing is cut off."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(width=width, highlight=False)


def progress_console() -> Console:
    """Standard error as a rich console: for what goes as it came, so that standard output holds nothing but results."""
    return Console(stderr=True, highlight=False)
