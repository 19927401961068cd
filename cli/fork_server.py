"""`multiworld fork-server`: what the supervisor forks its workers from. Not for people."""

import contextlib
import os
from collections.abc import Iterator


def fork_server() -> int:
    """Import what a worker needs; become one, or a frontend, in a fork, whenever a supervisor sends the command line of one."""
    with _environment(OPENBLAS_NUM_THREADS="1"):  # its threads would start at the import; workers compute with torch's
        import numpy as np  # noqa: F401
    # Whoever asks during an import whether there is CUDA is not to initialise it, which no fork survives.
    with _environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        import workers.app  # noqa: F401
    from deploy.fork_server import serve_forks

    return serve_forks(_become)


@contextlib.contextmanager
def _environment(**changes: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _become(command: list[str]) -> int:
    from cli.main import main
    from deploy.fork_server import show_as
    from deploy.worker_forks import PROGRAM

    arguments = command[len(PROGRAM) :]
    if arguments[0] == "frontend":  # which needs no token: it is the process that strangers' pictures are decoded in
        os.environ.pop("MULTIWORLD_TOKEN", None)
    show_as(" ".join(["multiworld", *arguments]))
    return main(arguments)
