"""`multiworld rolling-restart`: restart every worker of a running service, one after the other."""

import json
from typing import Any

from cli.operations import DEFAULT_OPERATIONS_URL, OperationsUrl, TokenFile, admin_access
from cli.service import ApiKeyFile, AsJson, CaFile, ClientCertFile, ServiceError, refusal, service, unreachable

EPILOG = """
[bold]Examples[/bold]

multiworld rolling-restart

multiworld rolling-restart --operations-url http://10.0.0.1:8002 --token-file token

[bold]Exit status[/bold]: 0 every worker was restarted, 1 one was not, 2 bad usage.
"""


def rolling_restart(
    url: OperationsUrl = DEFAULT_OPERATIONS_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
    api_key_file: ApiKeyFile = None,
    ca_file: CaFile = None,
    client_cert_file: ClientCertFile = None,
) -> int:
    """Restart every worker in turn, while the others serve.

    Each worker finishes what it has, ends, is started again by what started it (the service itself, Docker, Kubernetes) and
    serves again before the next one goes. No request fails. Ctrl-C stops after the worker at hand. A service with keys of
    administrators (--admin-keys-file) wants one of them: --api-key-file. With --json, each step is one line.
    """
    import httpx

    way_in = admin_access(api_key_file, token_file, ca_file, client_cert_file)
    last: dict[str, Any] = {}
    try:
        with (
            service(url, 10.0, way_in) as client,
            client.stream("POST", "/admin/rolling-restart", json={}, timeout=httpx.Timeout(10, read=None)) as response,
        ):
            if not response.is_success:
                response.read()
                raise ServiceError(refusal(response))
            for line in response.iter_lines():
                last = json.loads(line)
                if as_json:
                    print(line, flush=True)
                else:
                    _show(last)
    except httpx.ConnectError as error:
        raise unreachable(url, error, "--operations-url, the operators' port") from error
    except (httpx.TransportError, ValueError) as error:
        raise ServiceError(f"the connection to {url} failed: {error or type(error).__name__}") from error
    if last.get("state") != "done":
        raise ServiceError(str(last.get("error", "the service stopped in the middle of it")))
    return 0


def _show(step: dict[str, Any]) -> None:
    match step["state"]:
        case "restarting":
            print(f"{step['number']}/{step['total']} {step['worker']} ({step['place']}) ... ", end="", flush=True)
        case "restarted":
            print(f"gone after {step['left_s']:.1f} s, back after {step['back_s']:.1f} s")
        case "failed":
            print("failed")
        case "done":
            print(f"{step['restarted']} workers restarted")
