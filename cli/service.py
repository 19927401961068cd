"""Access to a running service: the options of the verbs for it, requests, and error messages."""

import os
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from multiworld_serving.common.config.client_options import client_options
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.settings import Options, setting
from multiworld_serving.common.config.tokens import read_token

if TYPE_CHECKING:
    import httpx

DEFAULT_URL = "http://127.0.0.1:8000"


Clients: TypeAlias = "deque[httpx.Client]"
"""One client for each URL of a service; the first one is in use."""


class Access(Options):
    """Options for credentials and TLS."""

    api_key_file: Path | None = setting(None, "Access", has_variable=True)
    """File with the API key; by default MULTIWORLD_API_KEY holds the key itself."""
    ca_file: Path | None = setting(None, "Access", has_variable=True)
    """CA certificates (PEM) that verify the certificate of the service; by default those of the system."""
    client_cert_file: Path | None = setting(None, "Access", has_variable=True)
    """Client certificate and private key (PEM), for a service that requires one."""

    def credentials(self) -> dict[str, Any]:
        """Return the arguments of httpx with these credentials. Raises UserError if a file is invalid."""
        file = self.api_key_file
        key = read_token(file, "key").get_secret_value() if file else os.environ.get("MULTIWORLD_API_KEY", "")
        return client_options(key.strip(), self.ca_file, self.client_cert_file)


class ServiceOptions(Access):
    """Options of a verb that uses a running service."""

    url: str = setting(DEFAULT_URL, has_variable=True)
    """URL of the HTTP API of the service, by default http://127.0.0.1:8000. Repeat the option, or separate with commas, for several
    frontends: status and predict use the next if one fails, the other verbs the first. Admin verbs find the admin port there."""
    timeout_s: float = setting(60.0, gt=0)
    """Timeout of one request, in seconds."""


class ServiceError(Exception):
    """The request failed or was refused. The message says what to do; the program exits with status 1."""


class ServiceUnreachableError(ServiceError):
    """No connection to the service could be made; further requests would fail too."""


class ServiceUnavailableError(ServiceError):
    """This frontend lost the connection, or cannot serve now (429, 502, 503); another one may."""


@contextmanager
def open_clients(options: ServiceOptions) -> Iterator[Clients]:
    """Open one HTTP client per URL, for `send_to_any`. Translates errors of HTTP in the block, and those of unexpected responses.

    Raises:
        UserError: a URL or a file of the credentials is invalid.
        ServiceError: see `send_request`, or a server of another kind responded.
    """
    import httpx

    from multiworld_client.clients import WITHOUT_PROXY

    credentials = options.credentials()
    clients: deque[httpx.Client] = deque()
    urls = [url.strip() for url in options.url.split(",")]
    with ExitStack() as stack, http_errors(urls[0], options.timeout_s):
        for url in dict.fromkeys(urls):
            try:
                client = httpx.Client(base_url=url, timeout=options.timeout_s, mounts=WITHOUT_PROXY, **credentials)
            except httpx.InvalidURL as error:
                raise UserError(f"--url {url}: {error}; expected a URL such as {DEFAULT_URL}") from error
            clients.append(stack.enter_context(client))
            if client.base_url.scheme not in ("http", "https") or not client.base_url.host:
                raise UserError(f"--url {url}: expected a URL such as {DEFAULT_URL}")
        try:
            yield clients
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ServiceError(f"{urls[0]} does not answer like a multiworld service of this version") from error


def send_to_any(clients: Clients, method: str, path: str, **request: Any) -> "httpx.Response":
    """As `send_request`, with the first client; if that fails, with the next one, which becomes the first.

    For requests without side effects only. Raises the error of the last client.
    """
    for left in reversed(range(len(clients))):
        try:
            return send_request(clients[0], method, path, **request)
        except (ServiceUnreachableError, ServiceUnavailableError):
            clients.rotate(-1)
            if not left:
                raise
    raise AssertionError("no client")


def send_request(
    client: "httpx.Client", method: str, path: str, *, stream: bool = False, **request: Any
) -> "httpx.Response":
    """Send one request and return its response, which is successful. Keyword arguments are those of httpx.

    If the service answers that the path belongs to its other port, the request and all later ones of this client go there.

    Args:
        stream: return before the body was read; the caller reads and closes the response.

    Raises:
        ServiceUnreachableError: no connection could be made.
        ServiceError: the connection failed, or the status is not 2xx.
    """
    for is_last in (False, True):
        with http_errors(str(client.base_url), client.timeout.read):
            response = client.send(client.build_request(method, path, **request), stream=stream)
            if not response.is_success:
                response.read()
            if is_last or not _use_other_port(client, response):
                return response.raise_for_status()
    raise AssertionError("the loop returns")


def _use_other_port(client: "httpx.Client", response: "httpx.Response") -> bool:
    """Have the client use the other port of the service if that is where the path belongs. Returns whether it does.

    The service has two: the HTTP API and the admin port.
    """
    if response.status_code != 404:
        return False
    try:
        port = response.json()["other_port"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    if type(port) is not int or not 0 < port < 65536 or port == client.base_url.port:
        return False
    client.base_url = client.base_url.copy_with(port=port)
    return True


def read_status(clients: Clients, model: str | None = None) -> "httpx.Response":
    """Return the response to GET /status as JSON, of this model or the first one, from any of the clients. Raises ServiceError."""
    params = {} if model is None else {"model": model}
    return send_to_any(clients, "GET", "/status", params=params, headers={"Accept": "application/json"})


@contextmanager
def http_errors(url: str, timeout_s: float | None) -> Iterator[None]:
    """Translate the exceptions of httpx in the block into ServiceError."""
    import httpx

    url = url.rstrip("/")
    try:
        yield
    except httpx.HTTPStatusError as error:
        kind = ServiceUnavailableError if error.response.status_code in (429, 502, 503) else ServiceError
        raise kind(error_message(error.response)) from error
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        if "certificate" in str(error).lower():
            advice = "give its CA with --ca-file, and use a host name that the certificate contains"
            raise ServiceUnreachableError(f"the certificate of {url} cannot be verified: {error}; {advice}") from error
        if "SSL" in str(error):
            advice = "if the service has no certificate, give a URL with http:// with --url"
            raise ServiceUnreachableError(f"no TLS connection to {url} ({error}): {advice}") from error
        advice = "start the service with `multiworld serve`, or give its URL with --url"
        raise ServiceUnreachableError(f"nothing answers at {url} ({error}): {advice}") from error
    except httpx.TransportError as error:
        if isinstance(error, httpx.TimeoutException):
            raise ServiceError(f"{url} did not answer within {timeout_s:g} s; increase --timeout-s") from error
        raise ServiceUnavailableError(f"the connection to {url} failed: {error or type(error).__name__}") from error


def error_message(response: "httpx.Response") -> str:
    """Return the error message of a response that is not 2xx."""
    try:
        message = str(response.json()["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        message = response.reason_phrase or "no reason given"
    if response.status_code == 401:
        message += "; give the key with --api-key-file or MULTIWORLD_API_KEY"
    return f"{message} (HTTP {response.status_code})"
