"""How `predict` and `status` speak to a running service."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from config import UserError

if TYPE_CHECKING:
    import httpx

Url = Annotated[
    str, typer.Option("--url", envvar="MULTIWORLD_URL", metavar="URL", help="Address of the service's HTTP API.")
]
TimeoutS = Annotated[
    float, typer.Option("--timeout-s", min=0.001, metavar="SECONDS", help="Longest wait for one answer of the service.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs, instead of a table for people.")]
DEFAULT_URL = "http://127.0.0.1:8000"


class ServiceError(Exception):
    """The service failed or refused; the message says what to do. The program ends with status 1."""


class ServiceUnreachableError(ServiceError):
    """Nothing answers at the address: to ask again makes no sense."""


def service(url: str, timeout_s: float) -> "httpx.Client":
    """A client of the service at this address. Raises UserError if it is no address."""
    import httpx

    try:
        if (parts := httpx.URL(url)).scheme in ("http", "https") and parts.host:
            return httpx.Client(base_url=url, timeout=timeout_s)
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
        raise ServiceUnreachableError(
            f"nothing answers at {url}: start the service with `multiworld serve`, or say where it is with --url"
        ) from error
    except httpx.TimeoutException as error:
        raise ServiceError(f"{url} did not answer in time; --timeout-s waits longer") from error
    except httpx.TransportError as error:
        raise ServiceError(f"the connection to {url} failed: {error or type(error).__name__}") from error
    if not response.is_success:
        raise ServiceError(refusal(response))
    return response


def refusal(response: "httpx.Response") -> str:
    """What an answer other than 2xx says, for people."""
    try:
        said = str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        said = response.reason_phrase or "no reason given"
    return f"{said} (HTTP {response.status_code})"
