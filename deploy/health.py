"""`python -m deploy.health URL`: the exit status says whether a program of this machine is well, for a container's health check.

It runs every few seconds in every container: nothing but the standard library is imported.
"""

import sys
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

TIMEOUT_S = 3.0


def complaint(url: str, timeout_s: float = TIMEOUT_S) -> str:
    """Why what answers at `url` is not well; empty when it says 200. Never takes much longer than `timeout_s`."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or not parts.port:
        return f"{url}: must be an address such as http://127.0.0.1:8000/healthz"
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
    """0 when it is well; else 1, and one line that says why, which `docker inspect` shows."""
    if len(arguments) != 1:
        print("usage: python -m deploy.health URL", file=sys.stderr)  # noqa: T201
        return 1
    if said := complaint(arguments[0]):
        print(said, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
