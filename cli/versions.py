"""`multiworld load-version` and `unload`: move a running service to other weights, or take its model out of service."""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.operations import DEFAULT_OPERATIONS_URL, OperationsUrl, TokenFile, admin_access
from cli.service import ApiKeyFile, AsJson, CaFile, ClientCertFile, ServiceError, ask, service

if TYPE_CHECKING:
    import httpx

LOAD_EPILOG = """
[bold]Examples[/bold]

multiworld load-version fine-tuned/epoch-12.safetensors

multiworld load-version

[bold]Exit status[/bold]: 0 the new version serves, 1 it does not and nothing has changed, 2 bad usage.
"""
UNLOAD_EPILOG = """
[bold]Exit status[/bold]: 0 the model is out of service, 1 nothing has changed, 2 bad usage.
"""

Weights = Annotated[
    str | None,
    typer.Argument(
        metavar="WEIGHTS",
        help="A path below the service's --weights-dir, a published name, or random:SEED; none takes those that the service "
        "was started with, read anew.",
        show_default=False,
    ),
]
TimeoutS = Annotated[
    float, typer.Option("--timeout-s", min=1.0, metavar="SECONDS", help="Longest wait for the service to be done.")
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
    """Have a running service answer with other weights of its model, without a failed request.

    Each worker in turn loads them beside those that it has and must pass a canary; then new requests go to them, and those under
    way end as they began. When anything goes wrong nothing has changed. After `unload`, this takes the model into service again.
    """
    parameters = {} if weights is None else {"weights": weights}
    way_in = admin_access(api_key_file, token_file, ca_file, client_cert_file)
    with service(url, timeout_s, way_in) as client, _waiting(f"loading {weights or 'the weights of its settings'}"):
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
    """Take the model of a running service out of service: new requests are refused with 503, those under way are answered.

    Its workers stay as they are. `load-version` takes it into service again.
    """
    way_in = admin_access(api_key_file, token_file, ca_file, client_cert_file)
    with service(url, timeout_s, way_in) as client, _waiting("answering what is under way"):
        _ask(client, "unload", {})
    print("the model is out of service")
    return 0


def _ask(client: "httpx.Client", verb: str, parameters: dict[str, str]) -> dict[str, Any]:
    try:
        (model, *_) = ask(client, "POST", "/v2/repository/index", json={}).json()
        path = f"/v2/repository/models/{model['name']}/{verb}"
        found: dict[str, Any] = ask(client, "POST", path, json={"parameters": parameters}).json()
        return found
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(f"{client.base_url} answers, but not as a service's operators' port does") from error


@contextlib.contextmanager
def _waiting(what: str) -> Iterator[None]:
    """Shows on a terminal that it goes on."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
