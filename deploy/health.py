"""Health check of a container: `python -m multiworld_serving.deploy.health URL` exits with 0 if GET URL returns 200.

Runs every few seconds in every container, so it imports the standard library only.
"""

import sys
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

TIMEOUT_S = 3.0


def health_error(url: str, timeout_s: float = TIMEOUT_S) -> str:
    """Return why GET `url` did not return 200; empty if it did. Takes at most about `timeout_s`."""
    try:
        build_opener(ProxyHandler({})).open(url, timeout=timeout_s).close()
    except HTTPError as error:
        return f"{url} answers {error.code}: {error.read(300).decode(errors='replace')}"
    except (OSError, HTTPException, ValueError) as error:
        return f"{url} does not answer: {error!r}"
    return ""


def main(arguments: list[str]) -> int:
    """Return 0 if healthy; otherwise print the reason, which `docker inspect` shows, and return 1."""
    error = health_error(arguments[0]) if len(arguments) == 1 else "expected one argument, a URL"
    print(error, end="\n" if error else "", file=sys.stderr)  # noqa: T201
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
