"""`multiworld fork-server`: what the supervisor forks its workers from. Not for people."""

import contextlib
import os
from collections.abc import Iterator


def fork_server() -> int:
    """Import what a worker needs; become a worker, in a fork, whenever the supervisor sends a worker's command line."""
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

    arguments = command[command.index("worker") :]
    show_as(" ".join(["multiworld", *arguments]))
    return main(arguments)
