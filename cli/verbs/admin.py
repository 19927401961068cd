"""Verbs for a running service, through its admin port: `rolling-restart`, `upgrade`, `drain`, `load-version`, `unload` and `models`."""

import contextlib
import json
from typing import Any, Literal
from urllib.parse import quote

from multiworld_serving.cli.options import AsJson, assignments
from multiworld_serving.cli.service import (
    Clients,
    ServiceError,
    ServiceOptions,
    ServiceUnavailableError,
    open_clients,
    read_status,
    send_request,
    send_to_any,
)
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.settings import setting

_STOP_S = 120.0
"""Time for the former frontends to answer their requests, when the model is ready or removed."""


class OperationOptions(ServiceOptions):
    """Options of an operation on a service."""

    timeout_s: float = setting(3600.0, ge=1)
    """Longest wait for a response or for one step."""
    model: str | None = setting(None)
    """Model, if the service has several; `rolling-restart` restarts the workers of all models without it."""


class RestartOptions(AsJson, OperationOptions):
    """Options of `rolling-restart`."""


class LoadVersionOptions(AsJson, OperationOptions):
    """Options of `load-version`."""

    weights: str | None = setting(None, positional=True)
    """A bundle or a file of weights below the service's --weights-dir, a published name, or random:SEED; default: reload the weights that
    the service was started with."""


def rolling_restart(options: RestartOptions) -> int:
    """Restart all workers one at a time while the others serve.

    Each worker finishes its batches and exits; whatever started it (the service, Docker, Kubernetes) starts it again; and it
    must be serving before the next worker is restarted. No request fails. Ctrl-C, and a step that takes longer than --timeout-s, stop
    after the current worker. If the service has admin keys (--admin-keys-file), give one with --api-key-file. With --json, prints one
    line per step.

    Examples:
        multiworld rolling-restart
        multiworld rolling-restart --url https://10.0.0.1:8002 --api-key-file admin.key

    Exit status: 0 all workers were restarted, 1 at least one was not, 2 invalid usage.
    """
    import httpx

    step: dict[str, Any] = {}
    path = "/admin/rolling-restart" + ("" if options.model is None else f"?model={quote(options.model)}")
    with (
        open_clients(options) as clients,
        contextlib.closing(send_request(clients[0], "POST", path, json={}, stream=True)) as steps,
    ):
        try:
            for line in steps.iter_lines():
                step = json.loads(line)
                if text := line if options.as_json else _step(step):
                    print(text, flush=True)
        except httpx.TimeoutException as error:
            if step.get("state") != "restarting":
                raise
            raise ServiceError(
                f"{step['worker']} ({step['slot']}) was told to restart and does not serve after {options.timeout_s:g} s; check "
                "that its supervisor has started it again, or increase --timeout-s"
            ) from error
    if step.get("state") != "done":
        raise ServiceError(str(step.get("error", "the service stopped before all workers were restarted")))
    return 0


def _step(step: dict[str, Any]) -> str:
    """A step of a rolling restart in words; empty for a failure, which the exit status and the error report."""
    match step["state"]:
        case "restarting":
            return f"{step['number']}/{step['total']} {step['worker']} ({step['slot']}): restarting"
        case "restarted":
            return f"{step['worker']}: stopped after {step['left_s']:.1f} s, serving after {step['back_s']:.1f} s"
        case "done":
            return f"{step['restarted']} workers restarted"
    return ""


class UpgradeOptions(ServiceOptions):
    """Options of `upgrade`."""

    timeout_s: float = setting(1200.0, gt=0)
    """Longest wait until the new processes serve."""


def upgrade(options: UpgradeOptions) -> int:
    """Replace a running `multiworld serve` by the code and the settings that are installed now, without an outage.

    The new processes start beside the present ones. When they serve, they accept the connections, and the present ones answer their
    requests and stop. If they do not become ready, the present ones continue. Programs that run alone are restarted one at a time instead.

    Examples:
        multiworld upgrade --api-key-file admin.key

    Exit status: 0 the new processes serve, 1 nothing has changed, 2 invalid usage.
    """
    with open_clients(options) as clients:
        send_request(clients[0], "POST", "/admin/upgrade", json={})
    print("upgraded: new processes serve")
    return 0


class DrainOptions(AsJson, ServiceOptions):
    """Options of `drain`."""

    host: str = setting(positional=True, metavar="HOST")
    """Host of the workers, as `multiworld status` and the leaders' logs name it."""
    undo: bool = setting(False)
    """Use the host again: its workers rejoin within seconds."""
    timeout_s: float = setting(600.0, gt=0)
    """Longest wait until its workers have left."""


def drain(options: DrainOptions) -> int:
    """Take the workers of a machine out of service, or put them back with --undo. No request fails.

    The workers leave one at a time, after they have returned their batches, and none of the machine may join until --undo. Each stage must
    have a ready replica on another machine. Then the machine can be stopped. For a machine that is dead, this keeps its workers
    out when it is back. A restart of all leaders and frontends ends it.

    Examples:
        multiworld drain b.example
        multiworld drain b.example --undo

    Exit status: 0 done, 1 a worker still serves, 2 invalid usage.
    """
    with open_clients(options) as clients:
        before = _hosts(clients)
        send_request(clients[0], "POST", "/admin/drain", json={"host": options.host, "undo": options.undo})
        status = read_status(clients).json()
    if options.as_json:
        print(json.dumps({"host": options.host, "drained": status["drained"]}))
        return 0
    if options.undo:
        print(f"{options.host}: its workers may join again")
        return 0
    print(f"{options.host} is drained: no worker of it serves")
    if options.host not in before:
        print(f"no process was connected from there; connected hosts: {', '.join(sorted(before))}")
    others = [
        each["name"] for kind in ("leaders", "frontends") for each in status[kind] if each["host"] == options.host
    ]
    if others:
        print(f"still running there: {', '.join(others)}; stop them with SIGTERM")
    return 0


def _hosts(clients: Clients) -> set[str]:
    """The hosts of all connected processes, of all models."""
    first = read_status(clients).json()
    found: set[str] = set()
    for status in (first, *(read_status(clients, name).json() for name in list(first.get("models", ()))[1:])):
        replicas = [*status["spares"], *(each for stage in status["stages"] for each in stage["replicas"])]
        found |= {each["host"] for each in (*replicas, *status["leaders"], *status["frontends"]) if each["host"]}
    return found


def load_version(options: LoadVersionOptions) -> int:
    """Switch a running service to other weights of its model, without a failed request.

    Each worker in turn loads the new weights next to the current ones and must pass a self-test. Then new requests use the new
    weights; requests in flight finish with the old ones. If any step fails, nothing changes; Ctrl-C cancels the load. After `unload`,
    this puts the model back into service.

    Examples:
        multiworld load-version fine-tuned/epoch-12.safetensors
        multiworld load-version

    Exit status: 0 the new version serves, 1 failure and nothing has changed, 2 invalid usage.
    """
    before, response = _operate(options, "load", {} if options.weights is None else {"weights": options.weights})
    if options.as_json:
        print(json.dumps(response))
    else:
        print(f"{response['name']} answers with {response['weights']}, version {response['version']}")
        if (before.get("version"), before.get("state")) == (response["version"], "READY"):
            print("nothing has changed: the service already had these weights")
    return 0


def unload(options: OperationOptions) -> int:
    """Take the model out of service: new requests get status 503, requests in flight are answered.

    The workers keep running. `load-version` puts the model back into service.

    Exit status: 0 the model is out of service, 1 failure and nothing has changed, 2 invalid usage.
    """
    _operate(options, "unload", {})
    print("the model is out of service")
    return 0


def _operate(options: OperationOptions, verb: str, parameters: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Request an operation on the model. Returns the model before, as in the index, and the response. Raises ServiceError."""
    with open_clients(options) as clients:
        index = send_request(clients[0], "POST", "/v2/repository/index", json={}).json()
        # The index lists the serving version of a model first, so it replaces a version that is loading.
        models = {each["name"]: each for each in reversed(index)}
        if options.model is None and len(models) > 1:
            raise UserError(f"the service has several models: name one with --model {' or --model '.join(models)}")
        name = options.model or next(iter(models))
        path = f"/v2/repository/models/{quote(name)}/{verb}"
        found: dict[str, Any] = send_request(clients[0], "POST", path, json={"parameters": parameters}).json()
        return models.get(name, {}), found


class ModelsOptions(AsJson, ServiceOptions):
    """Options of `models`."""

    action: Literal["list", "add", "share", "remove"] = setting(positional=True)
    """list, add, share or remove."""
    model: str | None = setting(None, positional=True, metavar="NAME")
    """For add, NAME=SOURCE with a model of torchvision or a bundle below --weights-dir of the service; for share and remove, NAME. A
    version of a model is NAME@VERSION."""
    shares: tuple[str, ...] = setting((), positional=True, metavar="VERSION=PERCENT")
    """For share, what versions get from now on, or VERSION=shadow; the others divide the rest."""
    share: float | None = setting(None, ge=0, le=100)
    """Share of the added version in the requests of the model, in percent; the other versions give it up. By default 0."""
    shadow: bool = setting(False)
    """Copy each request of the model to the added version. Its results are compared with those of the other versions and counted."""
    sets: tuple[str, ...] = setting((), names=("--set",), metavar="NAME=VALUE")
    """Setting of the added model as in a table [[models]], such as stages=1; may be repeated."""
    timeout_s: float = setting(600.0, gt=0, le=86_400)
    """Longest time until an added model is ready, or a removed one has finished its requests."""


def models(options: ModelsOptions) -> int:
    """List the models of a running service, add one, remove one, or divide the requests of a model among its versions.

    The other models keep their processes. `add` returns when the model is ready; if it does not become ready, nothing has changed.
    `remove` returns when its requests are answered. `list` shows the requests of each version, and how many got an error (5xx).
    `share` takes effect within a second. To keep a change after a restart of the service, write it into the settings file too. If the
    service has admin keys (--admin-keys-file), give one with --api-key-file.

    Examples:
        multiworld models list
        multiworld models add detector=detector.bundle --set stages=1 --set queue_limit=64
        multiworld models remove detector
        multiworld models add detector@2=better.bundle --share 5
        multiworld models share detector 2=50
        multiworld models remove detector@1

    Exit status: 0 done, 1 refused, and the models are as before, 2 invalid usage.
    """
    if bool(options.shares) != (options.action == "share") or not all("=" in each for each in options.shares):
        given = " ".join(filter(None, (options.model, *options.shares)))
        raise UserError(f"models {options.action} {given}: share takes NAME VERSION=PERCENT, and no other action does")
    with open_clients(options) as clients:
        if options.action != "list":
            _change(options, clients)
        found = send_to_any(clients, "POST", "/v2/repository/index", json={}).json()
        counts = _counts(send_to_any(clients, "GET", "/metrics").text)
    found = [each | counts.get(each["name"], {}) for each in found]
    if options.as_json:
        print(json.dumps(found))
        return 0
    for each in found:
        name, version = each.pop("name"), each.pop("version") or "-"
        if "share" in each:  # of several versions, or of one with a number: the other number is that of its weights
            name, version = name if "@" in name else f"{name}@1", ""
        texts = [name, version, each.pop("state"), each.pop("reason")]
        numbers = (
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in each.items()
        )
        print(" ".join(filter(None, (*texts, *numbers))))
    return 0


def _counts(metrics: str) -> dict[str, dict[str, int]]:
    """The requests and errors of each model, and the outcomes of the copies of its requests, in all frontends."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[str, int]] = {}
    families = ("multiworld_requests_total", "multiworld_shadow_requests_total")
    lines = "\n".join(line for line in metrics.splitlines() if line.startswith(families))
    for name, labels, value, *_ in (
        each for family in text_string_to_metric_families(lines) for each in family.samples
    ):
        counts = found.setdefault(labels["model"], {"requests": 0, "errors": 0})
        if name == families[0]:
            counts["requests"] += int(value)
            counts["errors"] += int(value) * labels["code"].startswith("5")
        else:
            counts[labels["outcome"]] = counts.get(labels["outcome"], 0) + int(value)
    return found


def _change(options: ModelsOptions, clients: Clients) -> None:
    """Request the change, and wait for its outcome. Raises ServiceError."""
    name, equals, source = (options.model or "").partition("=")
    if not name or bool(source) != (options.action == "add") or bool(equals) != bool(source):
        expected = "NAME=SOURCE, such as detector=detector.bundle" if options.action == "add" else "the NAME of a model"
        raise UserError(f"models {options.action} {options.model or ''}: expected {expected}")
    settings, shares = assignments(options.sets), assignments(options.shares)
    if options.shadow or options.share is not None:
        settings["share"] = "shadow" if options.shadow else str(options.share)
    request = {"action": options.action, "name": name, "source": source, "settings": settings, "shares": shares}
    timeout = {"timeout_s": options.timeout_s}
    try:
        send_request(clients[0], "POST", "/admin/models", json=request | timeout, timeout=options.timeout_s + _STOP_S)
    except ServiceUnavailableError as error:
        raise ServiceError(f"{error}; `multiworld models list` shows whether the models have changed") from error
