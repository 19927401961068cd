"""`multiworld rolling-restart`: restart every worker of a running service, one at a time."""

import json
from typing import Any

from multiworld_serving.cli.operations import DEFAULT_OPERATIONS_URL, OperationsUrl, TokenFile, admin_access
from multiworld_serving.cli.service import (
    ApiKeyFile,
    AsJson,
    CaFile,
    ClientCertFile,
    ServiceError,
    error_message,
    open_client,
    unreachable_error,
)

EPILOG = """
[bold]Examples[/bold]

multiworld rolling-restart

multiworld rolling-restart --operations-url http://10.0.0.1:8002 --token-file token

[bold]Exit status[/bold]: 0 all workers were restarted, 1 at least one was not, 2 invalid usage.
"""


def rolling_restart(
    url: OperationsUrl = DEFAULT_OPERATIONS_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
    api_key_file: ApiKeyFile = None,
    ca_file: CaFile = None,
    client_cert_file: ClientCertFile = None,
) -> int:
    """Restart all workers one at a time while the others serve.

    Each worker finishes its batches and exits; whatever started it (the service, Docker, Kubernetes) starts it again; and it
    must be serving before the next worker is restarted. No request fails. Ctrl-C stops after the current worker. If the service
    has admin keys (--admin-keys-file), give one with --api-key-file. With --json, prints one line per step.
    """
    import httpx

    credentials = admin_access(api_key_file, token_file, ca_file, client_cert_file)
    last: dict[str, Any] = {}
    try:
        with (
            open_client(url, 10.0, credentials) as client,
            client.stream("POST", "/admin/rolling-restart", json={}, timeout=httpx.Timeout(10, read=None)) as response,
        ):
            if not response.is_success:
                response.read()
                raise ServiceError(error_message(response))
            for line in response.iter_lines():
                last = json.loads(line)
                if as_json:
                    print(line, flush=True)
                else:
                    _show(last)
    except httpx.ConnectError as error:
        raise unreachable_error(url, error, "--operations-url (the admin port)") from error
    except (httpx.TransportError, ValueError, RecursionError) as error:
        raise ServiceError(f"the connection to {url} failed: {error or type(error).__name__}") from error
    if last.get("state") != "done":
        raise ServiceError(str(last.get("error", "the service stopped before all workers were restarted")))
    return 0


def _show(step: dict[str, Any]) -> None:
    match step["state"]:
        case "restarting":
            print(f"{step['number']}/{step['total']} {step['worker']} ({step['slot']}) ... ", end="", flush=True)
        case "restarted":
            print(f"stopped after {step['left_s']:.1f} s, serving after {step['back_s']:.1f} s")
        case "failed":
            print("failed")
        case "done":
            print(f"{step['restarted']} workers restarted")
