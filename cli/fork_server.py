"""`multiworld fork-server`: what the supervisor forks its workers from. Not for people."""

import os


def fork_server() -> int:
    """Import what a worker needs; become a worker, in a fork, whenever the supervisor sends a worker's command line."""
    # numpy's threads would start at its import, and do not survive a fork. Workers compute with torch's.
    name = "OPENBLAS_NUM_THREADS"
    wanted = os.environ.get(name)
    os.environ[name] = "1"
    import numpy as np  # noqa: F401

    del os.environ[name]
    if wanted is not None:
        os.environ[name] = wanted
    import workers.app  # noqa: F401
    from deploy.fork_server import serve_forks

    return serve_forks(_become)


def _become(command: list[str]) -> int:
    from cli.main import main
    from deploy.fork_server import show_as

    arguments = command[command.index("worker") :]
    show_as(" ".join(["multiworld", *arguments]))
    return main(arguments)
