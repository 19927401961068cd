"""`multiworld reserve`: what the supervisor holds ready to become a worker at once. Not for people."""

import json
import os
import sys


def reserve() -> int:
    """Import what a worker needs, read a worker's command line from standard input as one JSON list, and be that worker."""
    import workers.app  # noqa: F401

    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)  # no more than the line: what follows is the worker's own
        if not byte:
            return 0  # the supervisor has ended
        line += byte
    command: list[str] = json.loads(line)
    sys.argv = [sys.argv[0], *command[command.index("worker") :]]

    from cli.main import main

    return main(sys.argv[1:])
