"""A Ray cluster of several nodes on this machine.

The nodes run in a program of their own, `python -m tests.ray.cluster NODE=CPUS …`, which `RayCluster` controls. It prints the address
of the head, then executes the lines of its standard input:

    kill NODE             end all processes of a node at once, as a machine that is switched off
    kill_gcs, start_gcs   end and start the process on the head that manages the cluster

At the end of the input it ends the cluster.
"""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("MULTIWORLD_", "RAY_"))}
_SETTINGS = {
    "RAY_health_check_period_ms": "200",
    "RAY_health_check_failure_threshold": "10",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    "RAY_prestart_worker_first_driver": "0",
}
"""A node is dead after ten failed checks, which take 10 s each if it is frozen. A node ends when it has not reached the head for so long;
by default 60 s. Ray starts no processes before they are needed."""
_MEMORY_BYTES = 80 * 2**20
"""Of the object store of a node, which the service does not use."""


class RayCluster:
    """A running cluster. Call `close` at the end.

    Args:
        nodes: NODE=CPUS, the head first.
        redis: HOST:PORT of the Redis that keeps the head's state.
    """

    def __init__(self, *nodes: str, redis: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *nodes],
            cwd=_ROOT,
            env=_ENVIRONMENT | _SETTINGS | {"RAY_REDIS_ADDRESS": redis},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self._answer()

    def tell(self, *words: str) -> None:
        """Execute a command: see the module."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        assert self._answer() == "done"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if re.fullmatch(r"done|[\d.]+:\d+", line.strip()):  # Ray prints, too
                return line.strip()
        raise AssertionError("the Ray cluster has ended")

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run `multiworld` with the address of this cluster.

        Not in the checkout: Ray puts the folder of this command first into the search path of every node, and a checkout that was
        installed has the metadata of its version there.
        """
        command = [sys.executable, "-P", "-m", "multiworld_serving.cli.main", *arguments]
        return subprocess.run(
            command,
            check=False,
            cwd="/",
            env={**_ENVIRONMENT, "RAY_ADDRESS": self.address},
            capture_output=True,
            text=True,
            timeout=400,
        )

    def refusal(self, *arguments: str) -> str:
        """The line with which a command is refused."""
        done = self.run(*arguments)
        assert done.returncode == 2, done.stderr
        [line] = [line for line in done.stderr.splitlines() if line.startswith("multiworld: error:")]
        return line

    def close(self) -> None:
        """End all nodes."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=300)
        self._process.kill()


def _descendants(pid: int) -> list[int]:
    """Process ids of all children, and of their children."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found[1:]


class _Nodes:
    """The nodes by name. The first one is the head."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster  # noqa: PLC0415 - `RayCluster` does not need it

        self.cluster = Cluster()
        self.nodes: dict[str, Any] = {}
        self._addresses = itertools.count(2)

    def add(self, name: str, cpus: int) -> None:
        # Each node has its own address, as on several machines. Ray replaces 127.0.0.1 by the address of the machine.
        address = f"127.0.0.{next(self._addresses)}"
        self.nodes[name] = self.cluster.add_node(
            num_cpus=cpus,
            node_name=name,
            node_ip_address=address,
            object_store_memory=_MEMORY_BYTES,
            include_dashboard=False,
            include_log_monitor=False,
            no_monitor=True,
        )

    def kill(self, name: str) -> None:
        node = self.nodes.pop(name)
        processes = [each.process for group in node.all_processes.values() for each in group]
        pids = [pid for process in processes for pid in (process.pid, *_descendants(process.pid))]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in processes:
            process.wait()


def _main(arguments: list[str]) -> None:
    import ray  # noqa: PLC0415

    nodes = _Nodes()
    try:
        for argument in arguments:
            name, _, cpus = argument.partition("=")
            nodes.add(name, int(cpus))
        print(nodes.cluster.address, flush=True)
        for line in sys.stdin:
            command, *words = line.split()
            if command == "kill":
                nodes.kill(*words)
            elif command == "kill_gcs":
                nodes.cluster.head_node.kill_gcs_server()
            else:
                nodes.cluster.head_node.start_gcs_server()
            print("done", flush=True)
    finally:
        nodes.cluster.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    _main(sys.argv[1:])
