"""A change of a service, which a frontend requests from the supervisor: of its models, or an upgrade. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Annotated, Literal

import msgspec

from multiworld_serving.common.service.errors import NotReadyError, RequestRejected


class ModelChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Add a model or a version of one, remove it, divide the requests of a model among its versions, or upgrade the service."""

    action: Literal["add", "remove", "share", "upgrade"]
    name: str = ""
    """NAME, or NAME@VERSION for one of several versions."""
    source: str = ""
    """Of an added model: a name of torchvision, or a path below --weights-dir."""
    settings: dict[str, str] = {}
    """As in a table [[models]]."""
    shares: dict[str, str] = {}
    """Percentages by version, or "shadow"; see `model_versions.divide`."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 600.0
    """Longest time until an added model is ready."""


class ModelsUnchangedError(RequestRejected, reason="models_unchanged", status=409):
    """A model cannot be added or removed, or the service not be upgraded. Nothing has changed."""


async def request_change(supervisor: str, change: ModelChange, replaced: asyncio.Event, stop_s: float) -> None:
    """Have the supervisor change the models. If they change, others replace this frontend: wait until they alone accept connections.

    Args:
        supervisor: the name of its Unix socket.
        replaced: set when this frontend accepts no more connections.
        stop_s: longest time in which the present frontends stop.
    Raises:
        ModelsUnchangedError: the supervisor refuses the change, or the model did not become ready.
        NotReadyError: the supervisor has ended or failed, or has not replied in time.
    """
    try:
        async with asyncio.timeout(change.timeout_s + stop_s):
            if refused := await _reply(supervisor, change):
                raise ModelsUnchangedError(refused)
            if change.action != "share":
                await replaced.wait()
    except OSError as error:
        why = str(error) or f"it has not replied within {change.timeout_s + stop_s:g} s"
        raise NotReadyError(
            f"the supervisor has not confirmed the change: {why}; see the log of the service"
        ) from error


async def _reply(supervisor: str, change: ModelChange) -> str:
    """The reply of the supervisor: why the models are unchanged, or an empty text. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, "\0" + supervisor.removeprefix("@"))
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        with contextlib.closing(writer):
            writer.write(msgspec.json.encode(change) + b"\n")
            if not (reply := await reader.read()):
                raise ConnectionResetError("it has closed the connection")
    return msgspec.json.decode(reply, type=str)
