"""`multiworld rolling-restart`, `load-version` and `unload`: operations on a running service through its admin port."""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multiworld_serving.cli.options import AsJson, value
from multiworld_serving.cli.service import (
    Access,
    AdminPort,
    ServiceError,
    answer_errors,
    http_errors,
    send_request,
)

if TYPE_CHECKING:
    import httpx

RESTART_EPILOG = """
[bold]Examples[/bold]

multiworld rolling-restart

multiworld rolling-restart --operations-url http://10.0.0.1:8002 --token-file token

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
        help="A path below the service's --weights-dir, a published name, or random:SEED; default: reload the weights that the "
        "service was started with.",
        show_default=False,
    ),
]
OperationTimeoutS = Annotated[float, value("SECONDS", "Timeout of the operation, in seconds.", min=1.0)]


def rolling_restart(*, admin: AdminPort, as_json: AsJson = False, access: Access) -> int:
    """Restart all workers one at a time while the others serve.

    Each worker finishes its batches and exits; whatever started it (the service, Docker, Kubernetes) starts it again; and it
    must be serving before the next worker is restarted. No request fails. Ctrl-C stops after the current worker. If the service
    has admin keys (--admin-keys-file), give one with --api-key-file. With --json, prints one line per step.
    """
    import httpx

    last: dict[str, Any] = {}
    url = admin.operations_url
    with (
        admin.open_client(access, 10.0) as client,
        http_errors(url, option="--operations-url (the admin port)"),
        client.stream("POST", "/admin/rolling-restart", json={}, timeout=httpx.Timeout(10, read=None)) as response,
        answer_errors(url, "the admin port of a multiworld service"),
    ):
        if not response.is_success:
            response.read()
        for line in response.raise_for_status().iter_lines():
            last = json.loads(line)
            if as_json:
                print(line, flush=True)
            else:
                _show_step(last)
    if last.get("state") != "done":
        raise ServiceError(str(last.get("error", "the service stopped before all workers were restarted")))
    return 0


def _show_step(step: dict[str, Any]) -> None:
    match step["state"]:
        case "restarting":
            print(f"{step['number']}/{step['total']} {step['worker']} ({step['slot']}) ... ", end="", flush=True)
        case "restarted":
            print(f"stopped after {step['left_s']:.1f} s, serving after {step['back_s']:.1f} s")
        case "failed":
            print("failed")
        case "done":
            print(f"{step['restarted']} workers restarted")


def load_version(
    *,
    weights: Weights = None,
    admin: AdminPort,
    as_json: AsJson = False,
    timeout_s: OperationTimeoutS = 3600.0,
    access: Access,
) -> int:
    """Switch a running service to other weights of its model, without a failed request.

    Each worker in turn loads the new weights next to the current ones and must pass a self-test. Then new requests use the new
    weights; requests in flight finish with the old ones. If any step fails, nothing changes. After `unload`, this puts the model
    back into service.
    """
    parameters = {} if weights is None else {"weights": weights}
    with (
        admin.open_client(access, timeout_s) as client,
        _waiting(f"loading {weights or 'the configured weights'}"),
    ):
        answer = _ask(client, "load", parameters)
    if as_json:
        print(json.dumps(answer))
    else:
        print(f"{answer['name']} answers with {answer['weights']}, version {answer['version']}")
    return 0


def unload(*, admin: AdminPort, timeout_s: OperationTimeoutS = 3600.0, access: Access) -> int:
    """Take the model out of service: new requests get status 503, requests in flight are answered.

    The workers keep running. `load-version` puts the model back into service.
    """
    with admin.open_client(access, timeout_s) as client, _waiting("waiting for requests in flight"):
        _ask(client, "unload", {})
    print("the model is out of service")
    return 0


def _ask(client: "httpx.Client", verb: str, parameters: dict[str, str]) -> dict[str, Any]:
    with answer_errors(client.base_url, "the admin port of a multiworld service"):
        (model, *_) = send_request(client, "POST", "/v2/repository/index", json={}).json()
        path = f"/v2/repository/models/{model['name']}/{verb}"
        found: dict[str, Any] = send_request(client, "POST", path, json={"parameters": parameters}).json()
        return found


@contextlib.contextmanager
def _waiting(what: str) -> Iterator[None]:
    """Show a spinner while the block runs, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from multiworld_serving.cli.console import progress_console

    with progress_console().status(what):
        yield
