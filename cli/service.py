"""How the verbs speak to a running service."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from config import NOTHING, Access, UserError
from config.tokens import read_token

if TYPE_CHECKING:
    import httpx

Url = Annotated[
    str, typer.Option("--url", envvar="MULTIWORLD_URL", metavar="URL", help="Address of the service's HTTP API.")
]
TimeoutS = Annotated[
    float, typer.Option("--timeout-s", min=0.001, metavar="SECONDS", help="Longest wait for one answer of the service.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs, instead of a table for people.")]
_PANEL = "Access"
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        envvar="MULTIWORLD_API_KEY_FILE",
        metavar="FILE",
        help="File with the key that the service asks for. MULTIWORLD_API_KEY may hold the key itself.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        envvar="MULTIWORLD_CA_FILE",
        metavar="FILE",
        help="Authorities (PEM) that may have signed the service's certificate; by default those of the system.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
ClientCertFile = Annotated[
    Path | None,
    typer.Option(
        "--client-cert-file",
        envvar="MULTIWORLD_CLIENT_CERT_FILE",
        metavar="FILE",
        help="Certificate and private key (PEM) to show to a service that asks for one.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
DEFAULT_URL = "http://127.0.0.1:8000"


class ServiceError(Exception):
    """The service failed or refused; the message says what to do. The program ends with status 1."""


class ServiceUnreachableError(ServiceError):
    """Nothing answers at the address: to ask again makes no sense."""


def access(api_key_file: Path | None, ca_file: Path | None, client_cert_file: Path | None) -> Access:
    """How to get in, by these options and the environment. Raises UserError when a file cannot be used."""
    key = (
        read_token(api_key_file, "key").get_secret_value() if api_key_file else os.environ.get("MULTIWORLD_API_KEY", "")
    )
    return Access(key.strip(), ca_file, client_cert_file)


def service(url: str, timeout_s: float, way_in: Access = NOTHING) -> "httpx.Client":
    """A client of the service at this address. Raises UserError if it is no address."""
    import httpx

    try:
        if (parts := httpx.URL(url)).scheme in ("http", "https") and parts.host:
            return httpx.Client(base_url=url, timeout=timeout_s, **way_in.options)
    except httpx.InvalidURL:
        pass
    raise UserError(f"--url {url}: must be an address such as {DEFAULT_URL}")


def ask(client: "httpx.Client", method: str, path: str, **request: Any) -> "httpx.Response":
    """Send one request, with httpx's arguments, and return an answer that is a success.

    Raises:
        ServiceUnreachableError: nothing answers.
        ServiceError: the connection failed, or the service refused and said why.
    """
    import httpx

    url = str(client.base_url).rstrip("/")
    try:
        response = client.request(method, path, **request)
    except httpx.ConnectError as error:
        raise unreachable(url, error) from error
    except httpx.TimeoutException as error:
        raise ServiceError(f"{url} did not answer in time; --timeout-s waits longer") from error
    except httpx.TransportError as error:
        raise ServiceError(f"the connection to {url} failed: {error or type(error).__name__}") from error
    if not response.is_success:
        raise ServiceError(refusal(response))
    return response


def unreachable(url: str, error: Exception, option: str = "--url") -> ServiceUnreachableError:
    """What to do when no connection was made."""
    if "certificate" in str(error).lower():
        return ServiceUnreachableError(
            f"the certificate of {url} is not believed: {error}; --ca-file names the authorities, and the address must be "
            "one that the certificate is for"
        )
    return ServiceUnreachableError(
        f"nothing answers at {url}: start the service with `multiworld serve`, or say where it is with {option}"
    )


def refusal(response: "httpx.Response") -> str:
    """What an answer other than 2xx says, for people."""
    try:
        said = str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        said = response.reason_phrase or "no reason given"
    if response.status_code == 401:
        said += "; --api-key-file FILE, or MULTIWORLD_API_KEY, does so"
    return f"{said} (HTTP {response.status_code})"
