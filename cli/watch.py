"""`multiworld status --watch`: the status page's picture in a terminal, from the same GET /events."""

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cli.service import ServiceError, ask, service
from config import Access

if TYPE_CHECKING:
    from rich.console import RenderableType

_AGAIN_S = 1.0
_MOST_POINTS = 60
_MOST_EVENTS = 12
_BARS = " ▁▂▃▄▅▆▇█"
_WORDS = {
    "joining": ("joins", ""),
    "serves": ("serves", "green"),
    "rejoined": ("rejoined and serves", "green"),
    "takes_over": ("takes over", "yellow"),
    "draining": ("leaves", "yellow"),
    "broken": ("broken", "red"),
    "left": ("left", ""),
    "rerouted": ("rerouted", "yellow"),
}


@dataclass
class Picture:
    """What is known of the service now.

    Attributes:
        trouble: why nothing is heard of it; empty while all is well.
    """

    status: dict[str, Any] | None = None
    points: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_POINTS))
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_EVENTS))
    trouble: str = ""

    def take_in(self, kind: str, content: Any) -> None:
        """One message of GET /events."""
        self.trouble = ""
        if kind == "status":
            self.status = content
        elif kind == "points":
            self.points.extend(content)
        elif kind == "event" and content["id"] not in {event["id"] for event in self.events}:
            if self.events and content["id"] < self.events[-1]["id"]:  # another leader, which counts from 1 again
                self.events.clear()
            self.events.append(content)

    def drawn(self) -> "RenderableType":
        """For rich."""
        from rich.console import Group
        from rich.text import Text

        from cli.status import drawn

        parts: list[RenderableType] = []
        if self.trouble:
            parts.append(Text(self.trouble, style="red"))
        if self.status is not None:
            parts.append(drawn(self.status))
        if self.points:
            parts.append(Text(_throughput(self.points)))
        parts += [_line(event) for event in self.events]
        return Group(*parts)


def watch(url: str, timeout_s: float, way_in: Access) -> int:
    """Draw until Ctrl-C. Raises ServiceError when there is no such service at the start; later it waits for it."""
    from rich.live import Live

    from cli.console import console

    picture = Picture()
    with service(url, timeout_s, way_in) as client:
        picture.status = ask(client, "GET", "/status", headers={"Accept": "application/json"}).json()
        with Live(picture.drawn(), console=console(), auto_refresh=False) as live:
            while True:
                try:
                    for kind, content in _followed(client):
                        picture.take_in(kind, content)
                        live.update(picture.drawn(), refresh=True)
                    picture.trouble = f"{url} has stopped; waiting for it …"
                except ServiceError as error:
                    picture.trouble = f"{error}; trying again …"
                live.update(picture.drawn(), refresh=True)
                time.sleep(_AGAIN_S)


def _followed(client: Any) -> Iterator[tuple[str, Any]]:
    """The messages of GET /events, until the service stops. Raises ServiceError."""
    import httpx

    from cli.service import refusal

    try:
        with client.stream("GET", "/events") as response:
            if not response.is_success:
                response.read()
                raise ServiceError(refusal(response))
            yield from messages(response.iter_lines())
    except httpx.TransportError as error:
        raise ServiceError(f"{client.base_url} does not answer ({type(error).__name__})") from error


def messages(lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Server-sent events: their kind, and their content from JSON."""
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
    latency = "" if last["p50_ms"] is None else f", median {last['p50_ms']:.0f} ms, p99 {last['p99_ms']:.0f} ms"
    failed = f", {last['failed']:g} failed" if last["failed"] else ""
    return f"{bars}  {last['answered']:g} answers/s{latency}{failed}"


def _line(event: dict[str, Any]) -> "RenderableType":
    from rich.text import Text

    word, style = _WORDS.get(event["what"], (event["what"], ""))
    where = f"stage {event['stage']}" + ("" if event["replica"] is None else f" replica {event['replica']}")
    worker = f" {event['worker']}@{event['epoch']}" if event["worker"] else ""
    detail = f": {event['detail']}" if event["detail"] else ""
    at = time.strftime("%H:%M:%S", time.localtime(event["at_unix_s"]))
    return Text.assemble((at, "dim"), f" {where} ", (word, style), f"{worker}{detail}")
