"""Entry point of the fork server process: `python -m multiworld_serving.cli.fork_server`, started by `multiworld serve`."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

from multiworld_serving.cli.main import run
from multiworld_serving.deploy.processes.environment import PROGRAM
from multiworld_serving.deploy.processes.fork_server import run_fork_server, set_process_title


def fork_server() -> int:
    """Import what a worker needs, then fork a worker or frontend for each command line that the supervisor sends."""
    with _environment(
        OPENBLAS_NUM_THREADS="1"
    ):  # OpenBLAS starts its threads at the import; workers use those of torch
        import numpy as np  # noqa: F401
    # An import may check for CUDA. The check must not initialise CUDA: a process that did cannot fork.
    with _environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        import multiworld_serving.server.frontends.main
        import multiworld_serving.server.main
        import multiworld_serving.workers.main  # noqa: F401

    return run_fork_server(_run_command)


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


def _run_command(command: list[str]) -> NoReturn:
    """Run a command line of `multiworld` in the forked process, and end it."""
    arguments = command[len(PROGRAM) :]
    set_process_title(" ".join(["multiworld", *arguments]))
    run(arguments)


if __name__ == "__main__":
    sys.exit(fork_server())
