"""`multiworld status`: show the state of a running service, once or every second."""

import sys
import time
from typing import Any

from multiworld_serving.cli.console import table
from multiworld_serving.cli.options import AsJson
from multiworld_serving.cli.service import ServiceError, ServiceOptions, open_clients, read_status
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.settings import setting

_WATCH_S = 1.0
_CLEAR = "\x1b[H\x1b[J"
"""Control sequence of terminals that clears the screen."""


class StatusOptions(AsJson, ServiceOptions):
    """Options of `status`."""

    model: str | None = setting(None)
    """Model, if the service has several; by default the first one."""

    timeout_s: float = setting(10.0, gt=0)
    """Timeout of one request, in seconds."""
    watch: bool = setting(False)
    """Keep running and show the state every second, until Ctrl-C."""


def status(options: StatusOptions) -> int:
    """Show the stages of a running service, their replicas, and the last failure of each.

    Examples:
        multiworld status
        multiworld status --watch
        multiworld status --json --url http://10.0.0.1:8000
    """
    if options.watch and options.as_json:
        raise UserError("--watch and --json are mutually exclusive: programs read GET /events")
    with open_clients(options) as clients:
        response = read_status(clients, options.model)
        shown = response.text if options.as_json else render_status(response.json())
        print(shown, flush=True)
        while options.watch:
            time.sleep(_WATCH_S)
            try:
                shown = render_status(read_status(clients, options.model).json())
            except ServiceError as error:
                shown = f"{error}; retrying …"
            print(_CLEAR + shown if sys.stdout.isatty() else shown, flush=True)
    return 0


def render_status(snapshot: dict[str, Any]) -> str:
    """Render a document of GET /status. Raises KeyError or TypeError if it has another form."""
    lists = {
        "spares": [f"{each['worker']} ({each['state']})" for each in snapshot["spares"]],
        "leaders": [f"{each['name'] or each['address']} ({_state(each)})" for each in snapshot["leaders"]],
        "frontends": [f"{each['name']} ({_state(each)})" for each in snapshot["frontends"]],
        "drained hosts": snapshot.get("drained", []),
        "models": [f"{name} ({state})" for name, state in snapshot.get("models", {}).items()],
    }
    lines = (f"{kind}: {', '.join(names)}" for kind, names in lists.items() if names)
    return "\n".join([_headline(snapshot), "", _table(snapshot["stages"]), "", *lines])


def _headline(snapshot: dict[str, Any]) -> str:
    reasons = f" ({'; '.join(snapshot['reasons'])})" if snapshot["reasons"] else ""
    ready = [sum(replica["state"] == "ready" for replica in stage["replicas"]) for stage in snapshot["stages"]]
    tolerated = min(ready, default=0) - 1
    return (
        f"{snapshot['model']} {snapshot['version']}: {snapshot['state'].replace('_', ' ')}{reasons}, "
        f"leader up {duration(snapshot['uptime_s'])}, "
        f"{snapshot['queue_depth']} waiting, {snapshot['requests_in_flight']} requests in flight"
        + (f"\nfailures tolerated per stage: {tolerated}" if tolerated > 0 else "")
    )


def _table(stages: list[dict[str, Any]]) -> str:
    hosts = {replica.get("host") for stage in stages for replica in stage["replicas"]} - {None}
    host = ("host",) if len(hosts) > 1 else ()
    columns = ("replica", "state", "worker", *host, "pid", "device", "in flight", "done", "last failure")
    rows = [
        (
            f"s{stage['index']}.r{replica['slot']}" + (f"@{replica['generation']}" if replica["world"] else ""),
            replica["state"],
            *(replica.get(name) or "-" for name in ("worker", *host)),
            str(replica.get("pid") or "-"),
            replica["device"] or "-",
            str(replica["in_flight"]),
            str(replica["batches_done"]),
            _failure(replica["last_failure"]),
        )
        for stage in stages
        for replica in stage["replicas"]
    ]
    return table(columns, rows, numbers=("pid", "in flight", "done"))


def _state(process: dict[str, Any]) -> str:
    pid = f"pid {process['pid']}" if process.get("pid") else ""
    return ", ".join(filter(None, (process.get("state"), pid)))


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
