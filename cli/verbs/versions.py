"""`multiworld load-version` and `unload`: switch a running service to other weights, or take its model out of service."""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multiworld_serving.cli.operations import DEFAULT_OPERATIONS_URL, OperationsUrl, TokenFile, admin_access
from multiworld_serving.cli.service import (
    ApiKeyFile,
    AsJson,
    CaFile,
    ClientCertFile,
    ServiceError,
    open_client,
    send_request,
)

if TYPE_CHECKING:
    import httpx

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
TimeoutS = Annotated[
    float, typer.Option("--timeout-s", min=1.0, metavar="SECONDS", help="Timeout of the operation, in seconds.")
]


def load_version(
    weights: Weights = None,
    url: OperationsUrl = DEFAULT_OPERATIONS_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
    timeout_s: TimeoutS = 3600.0,
    api_key_file: ApiKeyFile = None,
    ca_file: CaFile = None,
    client_cert_file: ClientCertFile = None,
) -> int:
    """Switch a running service to other weights of its model, without a failed request.

    Each worker in turn loads the new weights next to the current ones and must pass a self-test. Then new requests use the new
    weights; requests in flight finish with the old ones. If any step fails, nothing changes. After `unload`, this puts the model
    back into service.
    """
    parameters = {} if weights is None else {"weights": weights}
    credentials = admin_access(api_key_file, token_file, ca_file, client_cert_file)
    with (
        open_client(url, timeout_s, credentials) as client,
        _waiting(f"loading {weights or 'the configured weights'}"),
    ):
        answer = _ask(client, "load", parameters)
    if as_json:
        print(json.dumps(answer))
    else:
        print(f"{answer['name']} answers with {answer['weights']}, version {answer['version']}")
    return 0


def unload(
    url: OperationsUrl = DEFAULT_OPERATIONS_URL,
    token_file: TokenFile = None,
    timeout_s: TimeoutS = 3600.0,
    api_key_file: ApiKeyFile = None,
    ca_file: CaFile = None,
    client_cert_file: ClientCertFile = None,
) -> int:
    """Take the model out of service: new requests get status 503, requests in flight are answered.

    The workers keep running. `load-version` puts the model back into service.
    """
    credentials = admin_access(api_key_file, token_file, ca_file, client_cert_file)
    with open_client(url, timeout_s, credentials) as client, _waiting("waiting for requests in flight"):
        _ask(client, "unload", {})
    print("the model is out of service")
    return 0


def _ask(client: "httpx.Client", verb: str, parameters: dict[str, str]) -> dict[str, Any]:
    try:
        (model, *_) = send_request(client, "POST", "/v2/repository/index", json={}).json()
        path = f"/v2/repository/models/{model['name']}/{verb}"
        found: dict[str, Any] = send_request(client, "POST", path, json={"parameters": parameters}).json()
        return found
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ServiceError(f"{client.base_url} does not answer like the admin port of a multiworld service") from error


@contextlib.contextmanager
def _waiting(what: str) -> Iterator[None]:
    """Show a spinner while the block runs, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
