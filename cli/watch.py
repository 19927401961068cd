"""`multiworld status --watch`: a live view of the service in the terminal, fed by GET /events."""

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from multiworld_serving.cli.service import ServiceError, http_errors, read_status
from multiworld_serving.cli.status_table import render_status

if TYPE_CHECKING:
    import httpx
    from rich.console import RenderableType

_RECONNECT_S = 1.0
_MAX_POINTS = 60
_MAX_EVENTS = 12
_BARS = " ▁▂▃▄▅▆▇█"
_EVENT_LABELS = {
    "joining": ("joins", ""),
    "serves": ("serves", "green"),
    "rejoined": ("rejoined and serves", "green"),
    "takes_over": ("takes over", "yellow"),
    "draining": ("leaves", "yellow"),
    "broken": ("broken", "red"),
    "left": ("left", ""),
    "rerouted": ("rerouted", "yellow"),
    "version_changed": ("version changed", ""),
    "leader_ready": ("ready", "green"),
    "leader_lost": ("lost", "red"),
}


@dataclass
class StatusView:
    """The state that is displayed.

    Attributes:
        error: why the connection is lost; empty while it works.
    """

    status: dict[str, Any] | None = None
    points: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MAX_POINTS))
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MAX_EVENTS))
    error: str = ""

    def apply(self, kind: str, content: Any) -> None:
        """Apply one message of GET /events."""
        self.error = ""
        if kind == "status":
            self.status = content
        elif kind == "points":
            self.points.extend(content)
        elif kind == "event" and content["id"] not in {event["id"] for event in self.events}:
            if self.events and content["id"] < self.events[-1]["id"]:  # a new leader numbers its events from 1 again
                self.events.clear()
            self.events.append(content)

    def render(self) -> "RenderableType":
        """Render the view for rich."""
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = []
        if self.error:
            parts.append(Text(self.error, style="red"))
        if self.status is not None:
            parts.append(render_status(self.status))
        if self.points:
            parts.append(Text(_throughput(self.points)))
        parts += [_line(event) for event in self.events]
        return Group(*parts)


def watch(clients: "deque[httpx.Client]") -> int:
    """Display until Ctrl-C. Raises ServiceError if the service does not answer at the start; later it reconnects, with the next client."""
    from rich.live import Live

    from multiworld_serving.cli.console import console

    view = StatusView()
    view.status = read_status(clients).json()
    with Live(view.render(), console=console(), auto_refresh=False) as live:
        while True:
            client = clients[0]
            url = str(client.base_url).rstrip("/")
            try:
                with http_errors(url), client.stream("GET", "/events") as response:
                    if not response.is_success:
                        response.read()
                    for kind, content in messages(response.raise_for_status().iter_lines()):
                        view.apply(kind, content)
                        live.update(view.render(), refresh=True)
                view.error = f"{url} has stopped; reconnecting …"
            except ServiceError as error:
                view.error = f"{error}; retrying …"
            clients.rotate(-1)
            live.update(view.render(), refresh=True)
            time.sleep(_RECONNECT_S)


def messages(lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Parse server-sent events: yield the event type and the decoded JSON data of each."""
    kind, data = "", ""
    for line in lines:
        name, _, value = line.partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            data = value
        elif not line and data:
            yield kind, json.loads(data)
            kind, data = "", ""


def _throughput(points: Iterable[dict[str, Any]]) -> str:
    rates = [float(point["answered"]) for point in points]
    *_, last = points
    top = max(*rates, 1.0)
    bars = "".join(_BARS[round(rate / top * (len(_BARS) - 1))] for rate in rates)
    times = (("median", "p50_ms"), ("p99", "p99_ms"), ("slowest", "slowest_ms"))
    latency = "" if last["p50_ms"] is None else "".join(f", {word} {last[name]:.0f} ms" for word, name in times)
    failed = f", {last['failed']:g} failed" if last["failed"] else ""
    return f"{bars}\n{last['answered']:g} answers/s{latency}{failed}"


def _line(event: dict[str, Any]) -> "RenderableType":
    from rich.text import Text

    word, style = _EVENT_LABELS.get(event["what"], (event["what"], ""))
    where = "leader" if event["what"].startswith("leader") else "model"
    if event["stage"] is not None:
        where = f"stage {event['stage']}" + ("" if event["replica"] is None else f" replica {event['replica']}")
    worker = f" {event['worker']}@{event['generation']}" if event["worker"] else ""
    detail = f": {event['detail']}" if event["detail"] else ""
    at = time.strftime("%H:%M:%S", time.localtime(event["at_unix_s"]))
    return Text.assemble((at, "dim"), f" {where} ", (word, style), f"{worker}{detail}")
