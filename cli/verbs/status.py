"""`multiworld status`: show the state of a running service, once or as it changes."""

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from multiworld_serving.cli.options import AsJson, flag
from multiworld_serving.cli.service import (
    DEFAULT_URL,
    Access,
    ServiceError,
    TimeoutS,
    Urls,
    answer_errors,
    http_errors,
    open_clients,
    read_status,
)
from multiworld_serving.cli.status_table import event_line, render_status, throughput
from multiworld_serving.common.config import UserError

if TYPE_CHECKING:
    import httpx
    from rich.console import RenderableType

EPILOG = """
[bold]Examples[/bold]

multiworld status

multiworld status --watch

multiworld status --json --url http://10.0.0.1:8000
"""

_RECONNECT_S = 1.0
_MAX_POINTS = 60
_MAX_EVENTS = 12

Watch = Annotated[bool, flag("--watch", "Keep running and show changes as they happen, until Ctrl-C.")]


def status(
    *,
    urls: Urls = (DEFAULT_URL,),  # type: ignore[assignment]
    as_json: AsJson = False,
    watch: Watch = False,
    timeout_s: TimeoutS = 10.0,
    access: Access,
) -> int:
    """Show the stages of a running service, their replicas, and the last failure of each."""
    if watch and as_json:
        raise UserError("--watch and --json exclude each other: programs read GET /events")
    with open_clients(urls, timeout_s, access.credentials()) as clients, answer_errors(", ".join(urls)):
        response = read_status(clients)
        if as_json:
            print(response.text)
        elif watch:
            _watch(clients, StatusView(response.json()))
        else:
            from multiworld_serving.cli.console import console

            console().print(render_status(response.json()))
    return 0


@dataclass
class StatusView:
    """What --watch displays.

    Attributes:
        error: why the connection is lost; empty while it works.
    """

    status: dict[str, Any]
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
            if self.events and content["id"] < self.events[-1]["id"]:  # a new leader numbers its events from 1
                self.events.clear()
            self.events.append(content)

    def render(self) -> "RenderableType":
        """Render the view for rich."""
        from rich.console import Group
        from rich.text import Text

        rate = [Text(throughput(self.points))] if self.points else []
        error = [Text(self.error, style="red")] if self.error else []
        return Group(*error, render_status(self.status), *rate, *map(event_line, self.events))


def _watch(clients: "deque[httpx.Client]", view: StatusView) -> None:
    """Display until Ctrl-C. If the connection is lost, it reconnects with the next client."""
    from rich.live import Live

    from multiworld_serving.cli.console import console

    with Live(view.render(), console=console(), auto_refresh=False) as live:
        while True:
            url = str(clients[0].base_url).rstrip("/")
            try:
                with http_errors(url), clients[0].stream("GET", "/events") as response:
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
