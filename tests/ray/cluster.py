"""A Ray cluster of several nodes on this machine, as a program: `python -m tests.ray.cluster NODE=CPUS …`.

It prints the address of the head, then executes the lines of its standard input: `kill NODE` ends all processes of a node at once, as a
machine that is switched off; `add NODE CPUS PATH` adds one whose Python searches PATH first. At the end of the input it ends the cluster.
"""

import contextlib
import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

_MEMORY_BYTES = 80 * 2**20
"""Of the object store of a node, which the service does not use."""


def descendants(pid: int) -> list[int]:
    """Process ids of all children, and of their children."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found[1:]


class Nodes:
    """The nodes by name. The first one is the head."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        self.nodes: dict[str, Any] = {}
        self._addresses = itertools.count(2)

    def add(self, name: str, cpus: int, path: str = "") -> None:
        more: dict[str, Any] = (
            {"env_vars": {"PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"}} if path else {}
        )
        # Each node has its own address, as on several machines. Ray replaces 127.0.0.1 by the address of the machine.
        address = f"127.0.0.{next(self._addresses)}"
        self.nodes[name] = self.cluster.add_node(
            num_cpus=cpus,
            node_name=name,
            node_ip_address=address,
            object_store_memory=_MEMORY_BYTES,
            include_dashboard=False,
            **more,
        )

    def kill(self, name: str) -> None:
        node = self.nodes.pop(name)
        processes = [each.process for group in node.all_processes.values() for each in group]
        pids = [pid for process in processes for pid in (process.pid, *descendants(process.pid))]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in processes:
            process.wait()


def main(arguments: list[str]) -> None:
    nodes = Nodes()
    try:
        for argument in arguments:
            name, _, cpus = argument.partition("=")
            nodes.add(name, int(cpus))
        print(nodes.cluster.address, flush=True)
        for line in sys.stdin:
            command, *words = line.split()
            if command == "kill":
                nodes.kill(*words)
            else:
                nodes.add(words[0], int(words[1]), *words[2:])
            print("done", flush=True)
    finally:
        nodes.cluster.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
