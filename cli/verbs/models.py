"""`multiworld models`: lists the models of a running service, adds one, or removes one."""

import contextlib
import json
import time
from collections import deque
from typing import TYPE_CHECKING, Literal

from multiworld_serving.cli.options import AsJson, assignments
from multiworld_serving.cli.service import (
    ServiceError,
    ServiceOptions,
    ServiceUnavailableError,
    ServiceUnreachableError,
    open_clients,
    send_request,
    send_to_any,
)
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.settings import setting

if TYPE_CHECKING:
    import httpx

_MAX_POLL_S = 2.0


class ModelsOptions(AsJson, ServiceOptions):
    """Options of `models`."""

    action: Literal["list", "add", "remove"] = setting(positional=True)
    """list, add or remove."""
    model: str | None = setting(None, positional=True, metavar="NAME")
    """For add, NAME=SOURCE with a model of torchvision or a bundle below --weights-dir of the service; for remove, NAME."""
    sets: tuple[str, ...] = setting((), names=("--set",), metavar="NAME=VALUE")
    """Setting of the added model as in a table [[models]], such as stages=1; may be repeated."""
    timeout_s: float = setting(600.0, gt=0, le=86_400)
    """Longest time until an added model is ready, or a removed one has finished its requests."""


def models(options: ModelsOptions) -> int:
    """List the models of a running service, add one, or remove one. The other models keep their processes.

    `add` returns when the model is ready; if it does not become ready, nothing has changed. `remove` returns when its requests are
    answered. To keep a change after a restart of the service, write it into the settings file too. If the service has admin keys
    (--admin-keys-file), give one with --api-key-file.

    Examples:
        multiworld models list
        multiworld models add detector=detector.bundle --set stages=1 --set queue_limit=64
        multiworld models remove detector

    Exit status: 0 done, 1 refused, and the models are as before, 2 invalid usage.
    """
    with open_clients(options) as clients:
        if options.action != "list":
            _change(options, clients)
        found = send_to_any(clients, "POST", "/v2/repository/index", json={}).json()
    if options.as_json:
        print(json.dumps(found))
    for each in () if options.as_json else found:
        print(f"{each['name']} {each['version'] or '-'} {each['state']} {each['reason']}".rstrip())
    return 0


def _change(options: ModelsOptions, clients: "deque[httpx.Client]") -> None:
    """Request the change, and wait for its outcome. Raises ServiceError."""
    name, equals, source = (options.model or "").partition("=")
    if not name or bool(source) != (options.action == "add") or bool(equals) != bool(source):
        expected = "NAME=SOURCE, such as detector=detector.bundle" if options.action == "add" else "the NAME of a model"
        raise UserError(f"models {options.action} {options.model or ''}: expected {expected}")
    request = {"action": options.action, "name": name, "source": source, "settings": assignments(options.sets)}
    timeout = {"timeout_s": options.timeout_s}
    change = send_request(clients[0], "POST", "/admin/models", json=request | timeout).json()["change"]
    until_s = time.monotonic() + options.timeout_s
    pause_s = 0.1
    while time.monotonic() < until_s:
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _MAX_POLL_S)  # the service logs each request
        with contextlib.suppress(ServiceUnavailableError, ServiceUnreachableError):  # frontends are being replaced
            refused = send_request(clients[0], "GET", "/admin/models").json().get(change)
            if refused:
                raise ServiceError(f"models {options.action} {name}: {refused}")
            if refused is not None:
                return
    raise ServiceError(
        f"models {options.action} {name}: not done within {options.timeout_s:g} s; see the log of the service"
    )
