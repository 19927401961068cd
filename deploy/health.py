"""Health check of a container: `python -m multiworld_serving.deploy.health URL` exits with 0 if GET URL returns 200.

Runs every few seconds in every container, so it imports the standard library only.
"""

import sys
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

TIMEOUT_S = 3.0


def health_error(url: str, timeout_s: float = TIMEOUT_S) -> str:
    """Return why GET `url` did not return 200; empty if it did. Takes at most about `timeout_s`."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or not parts.port:
        return f"{url}: expected a URL such as http://127.0.0.1:8000/healthz"
    connection = HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    try:
        connection.request("GET", parts.path or "/")
        answer = connection.getresponse()
        return (
            ""
            if answer.status == 200
            else f"{url} answers {answer.status}: {answer.read(300).decode(errors='replace')}"
        )
    except (OSError, HTTPException) as error:
        return f"{url} does not answer: {error!r}"
    finally:
        connection.close()


def main(arguments: list[str]) -> int:
    """Return 0 if healthy; otherwise print the reason, which `docker inspect` shows, and return 1."""
    if len(arguments) != 1:
        print("usage: python -m multiworld_serving.deploy.health URL", file=sys.stderr)  # noqa: T201
        return 1
    if error := health_error(arguments[0]):
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
