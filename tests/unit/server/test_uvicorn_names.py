"""The names of uvicorn that `common.http` uses although they are not public. pyproject.toml allows only versions that pass."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.lifespan.on import LifespanOn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

ADVICE = (
    f"uvicorn {uvicorn.__version__} differs from the versions that pyproject.toml allows: adapt common/http and this list, then change "
    "the version range"
)

SIGNATURES: list[tuple[Callable[..., Any], str]] = [
    (HttpToolsProtocol.__init__, "self config server_state app_state _loop"),
    (HttpToolsProtocol.connection_made, "self transport"),
    (HttpToolsProtocol.connection_lost, "self exc"),
    (HttpToolsProtocol.data_received, "self data"),
    (HttpToolsProtocol.pause_writing, "self"),
    (HttpToolsProtocol.resume_writing, "self"),
    (HttpToolsProtocol.shutdown, "self"),
    (HttpToolsProtocol.on_message_begin, "self"),
    (HttpToolsProtocol.on_url, "self url"),
    (HttpToolsProtocol.on_header, "self name value"),
    (HttpToolsProtocol.on_headers_complete, "self"),
    (HttpToolsProtocol.on_body, "self body"),
    (HttpToolsProtocol.on_message_complete, "self"),
    (HttpToolsProtocol.on_response_complete, "self"),
    (HttpToolsProtocol._unset_keepalive_if_required, "self"),
    (uvicorn.Server.__init__, "self config"),
    (uvicorn.Server.serve, "self sockets"),
    (uvicorn.Server.startup, "self sockets"),
    (uvicorn.Server.capture_signals, "self"),
    (LifespanOn.startup, "self"),
]


@pytest.mark.parametrize(("function", "parameters"), SIGNATURES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_uvicorn_has_the_methods_that_are_overridden_or_called(function: Callable[..., Any], parameters: str) -> None:
    found = " ".join(inspect.signature(inspect.unwrap(function)).parameters)
    assert found == parameters, f"{function.__qualname__}({found}), not ({parameters}): {ADVICE}"


async def protocol() -> HttpToolsProtocol:
    """A protocol that has begun a request. Its transport does nothing."""
    made = HttpToolsProtocol(uvicorn.Config(application, lifespan="off"), ServerState(), {}, None)
    made.connection_made(asyncio.Transport())
    made.on_message_begin()
    return made


async def application(scope: Any, receive: Any, send: Any) -> None: ...


ATTRIBUTES = {
    "HttpToolsProtocol": "config loop parser transport flow url headers cycle pipeline server_state",
    "ServerState": "connections default_headers",
    "FlowControl": "read_paused write_paused",
    "RequestResponseCycle": "disconnected message_event more_body response_started response_complete",
    "Server": "config server_state started should_exit",
    "LifespanOn": "should_exit state",
    "Config": "timeout_graceful_shutdown",
}


@pytest.mark.parametrize("name", ATTRIBUTES)
async def test_uvicorn_has_the_attributes_that_are_used(name: str) -> None:
    connection = await protocol()
    config = connection.config
    objects = {
        "HttpToolsProtocol": connection,
        "ServerState": connection.server_state,
        "FlowControl": FlowControl(connection.transport),
        "RequestResponseCycle": RequestResponseCycle(
            *[None] * len(list(inspect.signature(RequestResponseCycle).parameters))  # type: ignore[arg-type]
        ),
        "Server": uvicorn.Server(config),
        "LifespanOn": LifespanOn(config),
        "Config": config,
    }
    missing = [attribute for attribute in ATTRIBUTES[name].split() if not hasattr(objects[name], attribute)]
    assert not missing, f"{name} has no {', '.join(missing)}: {ADVICE}"


def test_uvicorn_stops_what_startup_has_stored_in_servers() -> None:
    """`HttpServer.startup` sets `servers` and reads `lifespan`, which `_serve` sets."""
    for method, attribute in [(uvicorn.Server.shutdown, "self.servers"), (uvicorn.Server._serve, "self.lifespan =")]:
        assert attribute in inspect.getsource(method), f"Server.{method.__name__} does not use {attribute}: {ADVICE}"


async def test_pipelined_requests_are_pairs_of_cycle_and_application() -> None:
    """`_reject` takes a request out of `pipeline`, whose first entry is the last request."""
    source = inspect.getsource(HttpToolsProtocol.on_headers_complete)
    assert "self.pipeline.appendleft((self.cycle, app))" in source, ADVICE
