"""HTTP client of the verbs: common options, requests to a running service, and error messages."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multiworld_serving.common.config import NO_CREDENTIALS, ClientCredentials, UserError
from multiworld_serving.common.config.tokens import read_token

if TYPE_CHECKING:
    import httpx

Url = Annotated[
    str, typer.Option("--url", envvar="MULTIWORLD_URL", metavar="URL", help="URL of the HTTP API of the service.")
]
TimeoutS = Annotated[
    float, typer.Option("--timeout-s", min=0.001, metavar="SECONDS", help="Timeout of one request, in seconds.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
_PANEL = "Access"
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        envvar="MULTIWORLD_API_KEY_FILE",
        metavar="FILE",
        help="File with the API key. Alternatively, MULTIWORLD_API_KEY holds the key itself.",
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
        help="CA certificates (PEM) that verify the certificate of the service; default: those of the system.",
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
        help="Client certificate and private key (PEM), for a service that requires one.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
DEFAULT_URL = "http://127.0.0.1:8000"


class ServiceError(Exception):
    """The request failed or was refused. The message says what to do; the program exits with status 1."""


class ServiceUnreachableError(ServiceError):
    """No connection to the service could be made; further requests would fail too."""


def access(api_key_file: Path | None, ca_file: Path | None, client_cert_file: Path | None) -> ClientCredentials:
    """Return the credentials from these options and the environment. Raises UserError if a file is invalid."""
    key = (
        read_token(api_key_file, "key").get_secret_value() if api_key_file else os.environ.get("MULTIWORLD_API_KEY", "")
    )
    return ClientCredentials(key.strip(), ca_file, client_cert_file)


def open_client(url: str, timeout_s: float, credentials: ClientCredentials = NO_CREDENTIALS) -> "httpx.Client":
    """Return an HTTP client of the service. Raises UserError if `url` is not an HTTP or HTTPS URL."""
    import httpx

    try:
        if (parts := httpx.URL(url)).scheme in ("http", "https") and parts.host:
            return httpx.Client(base_url=url, timeout=timeout_s, **credentials.options)
    except httpx.InvalidURL:
        pass
    raise UserError(f"--url {url}: expected a URL such as {DEFAULT_URL}")


def send_request(client: "httpx.Client", method: str, path: str, **request: Any) -> "httpx.Response":
    """Send one request and return its response, which is successful. Keyword arguments are those of httpx.

    Raises:
        ServiceUnreachableError: no connection could be made.
        ServiceError: the connection failed, or the status is not 2xx.
    """
    import httpx

    url = str(client.base_url).rstrip("/")
    try:
        response = client.request(method, path, **request)
    except httpx.ConnectError as error:
        raise unreachable_error(url, error) from error
    except httpx.TimeoutException as error:
        raise ServiceError(f"{url} did not answer within {client.timeout.read:g} s; increase --timeout-s") from error
    except httpx.TransportError as error:
        raise ServiceError(f"the connection to {url} failed: {error or type(error).__name__}") from error
    if not response.is_success:
        raise ServiceError(error_message(response))
    return response


def unreachable_error(url: str, error: Exception, option: str = "--url") -> ServiceUnreachableError:
    """Return the exception for a failed connection attempt."""
    if "certificate" in str(error).lower():
        return ServiceUnreachableError(
            f"the certificate of {url} cannot be verified: {error}; give its CA with --ca-file, and use a host name that "
            "the certificate contains"
        )
    return ServiceUnreachableError(
        f"nothing answers at {url}: start the service with `multiworld serve`, or give its URL with {option}"
    )


def error_message(response: "httpx.Response") -> str:
    """Return the error message of a response that is not 2xx."""
    try:
        message = str(response.json()["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        message = response.reason_phrase or "no reason given"
    if response.status_code == 401:
        message += "; give the key with --api-key-file or MULTIWORLD_API_KEY"
    return f"{message} (HTTP {response.status_code})"
