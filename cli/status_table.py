"""The tables of `multiworld status`, made from GET /status."""

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

_STYLES = {"ready": "green", "broken": "red", "absent": "red", "draining": "yellow", "left": "yellow"}
_SERVICE_STYLES = {
    "ready": "green",
    "degraded": "yellow",
    "not_ready": "red",
    "unloaded": "yellow",
    "draining": "yellow",
}
_MAX_EDGES = 24


def render_status(snapshot: dict[str, Any]) -> "RenderableType":
    """Render a document of GET /status. Raises KeyError or TypeError if it has another form."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_headline(snapshot), _table(snapshot["stages"])]
    if spares := snapshot["spares"]:
        parts.append(Text("spares: " + ", ".join(f"{spare['worker']} ({spare['state']})" for spare in spares)))
    if leaders := snapshot["leaders"]:
        parts.append(
            Text("leaders: " + ", ".join(f"{each['name'] or each['address']} ({each['state']})" for each in leaders))
        )
    if frontends := snapshot["frontends"]:
        named = (
            f"{each['name']} ({each['connections']} connection{'' if each['connections'] == 1 else 's'})"
            for each in frontends
        )
        parts.append(Text("frontends: " + ", ".join(named)))
    if edges := snapshot["edges"]:
        parts.append(_edges(edges))
    return Group(*parts)


def _headline(snapshot: dict[str, Any]) -> "Text":
    from rich.text import Text

    reasons = f" ({'; '.join(snapshot['reasons'])})" if snapshot["reasons"] else ""
    return Text.assemble(
        f"{snapshot['model']} {snapshot['version']}: ",
        (snapshot["state"].replace("_", " "), _SERVICE_STYLES.get(snapshot["state"], "")),
        f"{reasons}, up {duration(snapshot['uptime_s'])}, "
        f"{snapshot['queue_depth']} waiting, {snapshot['requests_in_flight']} requests in flight",
        _redundancy(snapshot["stages"]),
    )


def _redundancy(stages: list[dict[str, Any]]) -> str:
    """How many workers each stage can lose; empty if it is none, which the state then says."""
    ready = [sum(replica["state"] == "ready" for replica in stage["replicas"]) for stage in stages]
    count = min(ready, default=0) - 1
    return f"\neach stage can lose {count} worker{'' if count == 1 else 's'}" if count > 0 else ""


def _table(stages: list[dict[str, Any]]) -> "Table":
    from rich.text import Text

    from multiworld_serving.cli.console import table

    hosts = {replica.get("host") for stage in stages for replica in stage["replicas"]} - {None}
    host = ("host",) if len(hosts) > 1 else ()
    columns = ("replica", "state", "worker", *host, "pid", "device", "in flight", "done", "last failure")
    rows = table(*columns, numbers=("pid", "in flight", "done"), collapse_padding=True)  # fits into 80 columns
    for stage in stages:
        for replica in stage["replicas"]:
            rows.add_row(
                f"{replica['world']}@{replica['generation']}"
                if replica["world"]
                else f"s{stage['index']}.r{replica['slot']}",
                Text(replica["state"], style=_STYLES.get(replica["state"], "")),
                Text(replica["worker"] or "-"),
                *(Text(replica.get("host") or "-") for _ in host),
                str(replica.get("pid") or "-"),
                Text(replica["device"] or "-"),
                str(replica["in_flight"]),
                str(replica["batches_done"]),
                Text(_failure(replica["last_failure"])),
            )
    return rows


def _edges(edges: list[dict[str, Any]]) -> "Table":
    from rich.text import Text

    from multiworld_serving.cli.console import table

    more = len(edges) - _MAX_EDGES
    caption = f"{more} more edges are in GET /status" if more > 0 else None
    rows = table("edge: from", "to", "transport", "MB", "fetch ms", numbers=("MB", "fetch ms"), caption=caption)
    for edge in edges[:_MAX_EDGES]:
        relayed = edge["transport"] == "relay"
        rows.add_row(
            Text(edge["producer"]),
            Text(edge["consumer"]),
            Text(edge["transport"].replace("_", " "), style="yellow" if relayed else ""),
            "-" if relayed else f"{edge['received_bytes'] / 1e6:.1f}",
            "-" if relayed else f"{edge['fetch_s'] * 1e3:.2f}",
        )
    return rows


def _failure(failure: dict[str, Any] | None) -> str:
    if failure is None:
        return "-"
    number, unit, *_ = duration(time.time() - failure["at_unix_s"]).split()
    return f"{failure['cause']}, {number} {unit} ago"


def duration(seconds: float) -> str:
    """Format a time span: "42 s", "3 min 20 s", "2 h 5 min", "3 d 4 h"."""
    whole = max(0, round(seconds))
    for large, small, large_s, small_s in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= large_s:
            return f"{whole // large_s} {large} {whole % large_s // small_s} {small}"
    return f"{whole} s"
