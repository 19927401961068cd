"""`multiworld rolling-restart`, `load-version` and `unload`: operations on a running service through its admin port."""

import contextlib
import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from multiworld_serving.cli.options import AsJson, value
from multiworld_serving.cli.service import (
    DEFAULT_URL,
    Access,
    ServiceError,
    Urls,
    answer_errors,
    http_errors,
    open_clients,
    send_request,
)

RESTART_EPILOG = """
[bold]Examples[/bold]

multiworld rolling-restart

multiworld rolling-restart --url https://10.0.0.1:8002 --api-key-file admin.key

[bold]Exit status[/bold]: 0 all workers were restarted, 1 at least one was not, 2 invalid usage.
"""
LOAD_EPILOG = """
[bold]Examples[/bold]

multiworld load-version fine-tuned/epoch-12.safetensors

multiworld load-version

[bold]Exit status[/bold]: 0 the new version serves, 1 failure and nothing has changed, 2 invalid usage.
"""
UNLOAD_EPILOG = """
[bold]Exit status[/bold]: 0 the model is out of service, 1 failure and nothing has changed, 2 invalid usage.
"""

Weights = Annotated[
    str | None,
    typer.Argument(
        metavar="WEIGHTS",
        help="A bundle or a file of weights below the service's --weights-dir, a published name, or random:SEED; default: reload the "
        "weights that the service was started with.",
        show_default=False,
    ),
]
OperationTimeoutS = Annotated[float, value("SECONDS", "Longest wait for a response or for one step.", min=1.0)]
_ADMIN_PORT = "the admin port of a multiworld service"


def rolling_restart(
    *,
    urls: Urls = (DEFAULT_URL,),  # type: ignore[assignment]
    as_json: AsJson = False,
    timeout_s: OperationTimeoutS = 3600.0,
    access: Access,
) -> int:
    """Restart all workers one at a time while the others serve.

    Each worker finishes its batches and exits; whatever started it (the service, Docker, Kubernetes) starts it again; and it
    must be serving before the next worker is restarted. No request fails. Ctrl-C, and a step that takes longer than --timeout-s, stop
    after the current worker. If the service has admin keys (--admin-keys-file), give one with --api-key-file. With --json, prints one
    line per step.
    """
    step: dict[str, Any] = {}
    with (
        open_clients(urls, timeout_s, access.credentials()) as clients,
        answer_errors(urls[0], _ADMIN_PORT),
        http_errors(urls[0], timeout_s=timeout_s),
        contextlib.closing(send_request(clients[0], "POST", "/admin/rolling-restart", json={}, stream=True)) as steps,
    ):
        for line in steps.iter_lines():
            step = json.loads(line)
            if text := line if as_json else _step(step):
                print(text, flush=True)
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


def load_version(
    *,
    weights: Weights = None,
    urls: Urls = (DEFAULT_URL,),  # type: ignore[assignment]
    as_json: AsJson = False,
    timeout_s: OperationTimeoutS = 3600.0,
    access: Access,
) -> int:
    """Switch a running service to other weights of its model, without a failed request.

    Each worker in turn loads the new weights next to the current ones and must pass a self-test. Then new requests use the new
    weights; requests in flight finish with the old ones. If any step fails, nothing changes; Ctrl-C cancels the load. After `unload`,
    this puts the model back into service.
    """
    answer = _ask(urls, timeout_s, access, "load", {} if weights is None else {"weights": weights})
    if as_json:
        print(json.dumps(answer))
    else:
        print(f"{answer['name']} answers with {answer['weights']}, version {answer['version']}")
    return 0


def unload(
    *,
    urls: Urls = (DEFAULT_URL,),  # type: ignore[assignment]
    timeout_s: OperationTimeoutS = 3600.0,
    access: Access,
) -> int:
    """Take the model out of service: new requests get status 503, requests in flight are answered.

    The workers keep running. `load-version` puts the model back into service.
    """
    _ask(urls, timeout_s, access, "unload", {})
    print("the model is out of service")
    return 0


def _ask(
    urls: Sequence[str], timeout_s: float, access: Access, verb: str, parameters: dict[str, str]
) -> dict[str, Any]:
    """Ask for an operation on the model and return the response. Raises ServiceError."""
    with open_clients(urls, timeout_s, access.credentials()) as clients, answer_errors(urls[0], _ADMIN_PORT):
        (model, *_) = send_request(clients[0], "POST", "/v2/repository/index", json={}).json()
        path = f"/v2/repository/models/{model['name']}/{verb}"
        found: dict[str, Any] = send_request(clients[0], "POST", path, json={"parameters": parameters}).json()
        return found
