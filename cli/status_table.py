"""What `multiworld status` shows: the tables of GET /status, and lines for the messages of GET /events."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

_STYLES = {
    **dict.fromkeys(("ready", "serves", "rejoined", "leader_ready"), "green"),
    **dict.fromkeys(("degraded", "unloaded", "draining", "left", "takes_over", "rerouted"), "yellow"),
    **dict.fromkeys(("broken", "absent", "not_ready", "leader_lost"), "red"),
}
"""Color of a state of the service or of a replica, and of an event."""
_BARS = " ▁▂▃▄▅▆▇█"


def render_status(snapshot: dict[str, Any]) -> "RenderableType":
    """Render a document of GET /status. Raises KeyError or TypeError if it has another form."""
    from rich.console import Group
    from rich.text import Text

    lists = {
        "spares": [f"{each['worker']} ({each['state']})" for each in snapshot["spares"]],
        "leaders": [f"{each['name'] or each['address']} ({each['state']})" for each in snapshot["leaders"]],
        "frontends": [f"{each['name']} ({each['connections']} connections)" for each in snapshot["frontends"]],
    }
    lines = (Text(f"{kind}: {', '.join(names)}") for kind, names in lists.items() if names)
    return Group(_headline(snapshot), _table(snapshot["stages"]), *lines)


def _headline(snapshot: dict[str, Any]) -> "Text":
    from rich.text import Text

    reasons = f" ({'; '.join(snapshot['reasons'])})" if snapshot["reasons"] else ""
    return Text.assemble(
        f"{snapshot['model']} {snapshot['version']}: ",
        (snapshot["state"].replace("_", " "), _STYLES.get(snapshot["state"], "")),
        f"{reasons}, up {duration(snapshot['uptime_s'])}, "
        f"{snapshot['queue_depth']} waiting, {snapshot['requests_in_flight']} requests in flight",
        _redundancy(snapshot["stages"]),
    )


def _redundancy(stages: list[dict[str, Any]]) -> str:
    """How many workers each stage can lose; empty if it is none, which the state then says."""
    ready = [sum(replica["state"] == "ready" for replica in stage["replicas"]) for stage in stages]
    count = min(ready, default=0) - 1
    return f"\nfailures tolerated per stage: {count}" if count > 0 else ""


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


def _failure(failure: dict[str, Any] | None) -> str:
    if failure is None:
        return "-"
    number, unit, *_ = duration(time.time() - failure["at_unix_s"]).split()
    return f"{failure['cause']}, {number} {unit} ago"


def throughput(points: Iterable[dict[str, Any]]) -> str:
    """The answers per second as a bar for each second, and the last second in words."""
    rates = [float(point["answered"]) for point in points]
    *_, last = points
    top = max(*rates, 1.0)
    bars = "".join(_BARS[round(rate / top * (len(_BARS) - 1))] for rate in rates)
    times = (("median", "p50_ms"), ("p99", "p99_ms"), ("slowest", "slowest_ms"))
    latency = "" if last["p50_ms"] is None else "".join(f", {word} {last[name]:.0f} ms" for word, name in times)
    failed = f", {last['failed']:g} failed" if last["failed"] else ""
    return f"{bars}\n{last['answered']:g} answers/s{latency}{failed}"


def event_line(event: dict[str, Any]) -> "Text":
    """One event of GET /events as a line."""
    from rich.text import Text

    where = "leader" if event["what"].startswith("leader") else "model"
    if event["stage"] is not None:
        where = f"stage {event['stage']}" + ("" if event["replica"] is None else f" replica {event['replica']}")
    what = event["what"].removeprefix("leader_").replace("_", " ")
    worker = f" {event['worker']}@{event['generation']}" if event["worker"] else ""
    detail = f": {event['detail']}" if event["detail"] else ""
    at = time.strftime("%H:%M:%S", time.localtime(event["at_unix_s"]))
    return Text.assemble((at, "dim"), f" {where} ", (what, _STYLES.get(event["what"], "")), f"{worker}{detail}")


def duration(seconds: float) -> str:
    """Format a time span: "42 s", "3 min 20 s", "2 h 5 min", "3 d 4 h"."""
    whole = max(0, round(seconds))
    for large, small, large_s, small_s in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= large_s:
            return f"{whole // large_s} {large} {whole % large_s // small_s} {small}"
    return f"{whole} s"
