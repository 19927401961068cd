"""Entry point of the fork server: `python -m multiworld_serving.cli.fork_server FD`, started by `multiworld serve`."""

import os
import sys

from setproctitle import setproctitle

from multiworld_serving.cli.main import run
from multiworld_serving.deploy.processes.fork_server import serve_forks
from multiworld_serving.deploy.processes.programs import PROGRAM


def fork_server(control_fd: int) -> int:
    """Import what a worker needs, then fork a process for each command line that the supervisor sends."""
    threads = os.environ["OPENBLAS_NUM_THREADS"]
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # OpenBLAS starts its threads at the import; workers use those of torch
    import numpy as np  # noqa: F401

    os.environ["OPENBLAS_NUM_THREADS"] = threads
    # An import may check for CUDA. The check must not initialise CUDA: a process that did cannot fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch._dynamo  # noqa: F401 - torch imports it when a graph is checked: two seconds in each process

    import multiworld_serving.server.frontends.main
    import multiworld_serving.server.main
    import multiworld_serving.workers.main  # noqa: F401

    del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
    command = serve_forks(control_fd)
    if command is not None:
        setproctitle(" ".join(["multiworld", *command[len(PROGRAM) :]]))
        run(command[len(PROGRAM) :])
    return 0


if __name__ == "__main__":
    sys.exit(fork_server(int(sys.argv[1])))
