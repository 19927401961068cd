"""`multiworld frontend`: a process of `multiworld serve` that answers HTTP. Not for people."""

from typing import Annotated, Literal

import typer

from config import configure_logging


def frontend(
    name: Annotated[str, typer.Option(help="Of this frontend.")],
    leader: Annotated[str, typer.Option(help="Path of the leader's Unix socket.")],
    log_level: Annotated[str, typer.Option(help="Least severity to be logged.")] = "info",
    log_format: Annotated[Literal["text", "json"], typer.Option(help="Of log lines.")] = "text",
) -> int:
    """Serve HTTP on the socket that the leader hands over, and ask it."""
    configure_logging(log_level, log_format, process=name)
    from server.frontends.process import run

    return run(leader, name)
