"""`multiworld status`: how a running service stands."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.service import (
    DEFAULT_URL,
    ApiKeyFile,
    AsJson,
    CaFile,
    ClientCertFile,
    ServiceError,
    TimeoutS,
    Url,
    access,
    ask,
    service,
)
from config import Access, UserError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

EPILOG = """
[bold]Examples[/bold]

multiworld status

multiworld status --watch

multiworld status --json --url http://10.0.0.1:8000
"""

STYLES = {"ready": "green", "broken": "red", "absent": "red", "draining": "yellow"}


Watch = Annotated[bool, typer.Option("--watch", help="Stay, and show each change as it happens, until Ctrl-C.")]


def status(
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
    watch: Watch = False,
    timeout_s: TimeoutS = 10.0,
    api_key_file: ApiKeyFile = None,
    ca_file: CaFile = None,
    client_cert_file: ClientCertFile = None,
) -> int:
    """Show the stages of a running service, their replicas, and how each failed last."""
    way_in = access(api_key_file, ca_file, client_cert_file)
    if watch:
        return _watch(url, timeout_s, way_in, as_json=as_json)
    with service(url, timeout_s, way_in) as client:
        response = ask(client, "GET", "/status", headers={"Accept": "application/json"})
    if as_json:
        print(response.text)
        return 0
    from cli.console import console

    try:
        picture = drawn(response.json())
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(f"{url} answers, but not as a multiworld service of this version does") from error
    console().print(picture)
    return 0


def _watch(url: str, timeout_s: float, way_in: Access, *, as_json: bool) -> int:
    if as_json:
        raise UserError("--watch and --json cannot go together: programs read GET /events")
    from cli.watch import watch

    try:
        return watch(url, timeout_s, way_in)
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(f"{url} answers, but not as a multiworld service of this version does") from error


def drawn(snapshot: dict[str, Any]) -> "RenderableType":
    """What GET /status says, for rich. Raises KeyError or TypeError when it is something else."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(_headline(snapshot)), _table(snapshot["stages"])]
    if spares := snapshot["spares"]:
        parts.append(Text("spares: " + ", ".join(f"{spare['worker']} ({spare['state']})" for spare in spares)))
    return Group(*parts)


def _headline(snapshot: dict[str, Any]) -> str:
    state = "draining" if snapshot["draining"] else "ready" if snapshot["ready"] else "not ready"
    return (
        f"{snapshot['model']} {snapshot['version']}: {state}, up {duration(snapshot['uptime_s'])}, "
        f"{snapshot['queue_depth']} waiting, {snapshot['requests_in_flight']} requests in flight"
    )


def _table(stages: list[dict[str, Any]]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("stage", "replica", "state", "worker", "device", "world"):
        table.add_column(name)
    for name in ("in flight", "done"):
        table.add_column(name, justify="right")
    table.add_column("last failure")
    for stage in stages:
        for replica in stage["replicas"]:
            table.add_row(
                str(stage["index"]),
                str(replica["slot"]),
                Text(replica["state"], style=STYLES.get(replica["state"], "")),
                Text(replica["worker"] or "-"),
                Text(replica["device"] or "-"),
                Text(f"{replica['world']}@{replica['epoch']}" if replica["world"] else "-"),
                str(replica["in_flight"]),
                str(replica["batches_done"]),
                Text(_failure(replica["last_failure"])),
            )
    return table


def _failure(failure: dict[str, Any] | None) -> str:
    if failure is None:
        return "-"
    return f"{failure['cause']}, {duration(time.time() - failure['at_unix_s'])} ago"


def duration(seconds: float) -> str:
    """A time span for people: "42 s", "3 min 20 s", "2 h 5 min", "3 d 4 h"."""
    whole = max(0, round(seconds))
    for large, small, large_s, small_s in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= large_s:
            return f"{whole // large_s} {large} {whole % large_s // small_s} {small}"
    return f"{whole} s"
