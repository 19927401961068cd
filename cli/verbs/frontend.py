"""`multiworld frontend` (internal): a frontend process, started by `multiworld serve`."""

from typing import Annotated, Literal

import typer

from multiworld_serving.common.config import configure_logging


def frontend(
    name: Annotated[str, typer.Option(help="Name of this frontend.")],
    leader: Annotated[str, typer.Option(help="Path of the Unix socket of the leader.")],
    log_level: Annotated[str, typer.Option(help="Minimum severity of log lines.")] = "info",
    log_format: Annotated[Literal["text", "json"], typer.Option(help="Format of log lines.")] = "text",
) -> int:
    """Serve HTTP on the socket that the leader passes, and forward requests to the leader."""
    configure_logging(log_level, log_format, process=name)
    from multiworld_serving.server.frontends.process import run

    return run(leader, name)
