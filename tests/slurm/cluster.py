"""A Slurm cluster of several nodes on this machine, each in a network namespace with a host name of its own.

Needs the programs of Debian's packages slurm-wlm and munge, and root. The controller and its state are in a temporary folder, which is also
the shared file system of the nodes.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import pytest

from tests.machines.network import Host, Network, need_namespaces
from tests.waiting import wait_until

CONTROLLER = "controller"
_CPUS = 8
"""Of each node, as far as Slurm knows."""
_COMMAND_S = 120.0
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")


def need_slurm() -> None:
    """Skip the test if Slurm is not installed, or network namespaces cannot be created."""
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"{', '.join(missing)} not found: apt-get install slurm-wlm munge")
    need_namespaces()


class SlurmCluster:
    """A running cluster, inside its `with` block.

    Args:
        folder: for its files; short, because it is part of the path of a Unix socket.
        nodes: names.

    Attributes:
        addresses: of the nodes.
    """

    def __init__(self, folder: Path, *nodes: str) -> None:
        self.folder = folder
        self.addresses = {name: f"10.91.0.{number}" for number, name in enumerate((CONTROLLER, *nodes), start=1)}
        self._nodes = nodes
        self._network = Network()
        self._hosts: dict[str, Host] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def host(self, node: str) -> Host:
        """The network namespace of a node."""
        return self._hosts[node]

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """Run a command of Slurm on the controller; returns its output. Raises subprocess.CalledProcessError."""
        ended = subprocess.run(
            self._on(CONTROLLER, command),
            env=self._environment | dict(environment or {}),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )
        if ended.returncode:
            raise subprocess.CalledProcessError(ended.returncode, command, ended.stdout, ended.stderr)
        return ended.stdout.strip()

    def pids(self, node: str) -> list[int]:
        """All processes on a node."""
        found = subprocess.run(
            ["ip", "netns", "pids", self._hosts[node].namespace], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in found.stdout.split()]

    def programs(self, node: str, title: str) -> list[int]:
        """The processes on a node whose command line contains this text."""
        found = []
        for pid in self.pids(node):
            with contextlib.suppress(OSError):
                if title in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                    found.append(pid)
        return found

    def switch_off(self, node: str) -> None:
        """Kill all processes of a node at once, and tell Slurm, which would notice it after `SlurmdTimeout`."""
        for pid in self.pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._processes.pop(node).wait()
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=off")

    def states(self) -> dict[str, str]:
        """The state of each node, such as "idle", "mixed" or "down*"."""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    def _start(self) -> None:
        self._stack.enter_context(self._network)
        for name, address in self.addresses.items():
            self._hosts[name] = self._network.host(name, f"{address}/24")
        files = {"slurm.conf": self._configuration(), "cgroup.conf": "CgroupPlugin=cgroup/v1\n"}
        files["hosts"] = "127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in self.addresses.items())
        for name, text in files.items():
            (self.folder / name).write_text(text)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        socket = self.folder / "munge.socket"
        self._launch(
            "munge",
            CONTROLLER,
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket}"),
            *(f"--pid-file={self.folder}/munge.pid", f"--log-file={self.folder}/munge.log"),
            *(f"--seed-file={self.folder}/munge.seed",),
        )
        wait_until(socket.exists)
        self._launch(CONTROLLER, CONTROLLER, "slurmctld", "-D")
        for node in self._nodes:
            self._launch(node, node, "slurmd", "-D")
        wait_until(self._settled)

    def _settled(self) -> bool:
        try:
            return set(self.states().values()) == {"idle"}
        except subprocess.CalledProcessError:
            return False

    def _stop(self) -> None:
        for name, process in reversed(self._processes.items()):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                print(f"{name} had to be killed", file=sys.stderr)
        for node in self._hosts:
            for pid in self.pids(node):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._stack.close()

    @property
    def _environment(self) -> dict[str, str]:
        """Of all programs: `multiworld` of this interpreter is in PATH."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MULTIWORLD_", "SLURM_"))}
        return kept | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "HOME": str(self.folder),
        }

    def _on(self, node: str, command: tuple[str, ...]) -> list[str]:
        """The command line that runs a command on a node: with its network, host name and /etc/hosts."""
        script = f'hostname {node} && mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        return [
            *("ip", "netns", "exec", self._hosts[node].namespace, "unshare", "--uts", "--mount"),
            *("sh", "-c", script, node, *command),
        ]

    def _launch(self, name: str, node: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("w") as log:
            self._processes[name] = subprocess.Popen(
                self._on(node, command), env=self._environment, cwd=self.folder, stdout=log, stderr=log
            )

    def _configuration(self) -> str:
        folder = self.folder
        for name in ("state", "spool"):
            (folder / name).mkdir(exist_ok=True)
        nodes = "".join(
            f"NodeName={name} NodeAddr={self.addresses[name]} CPUs={_CPUS} State=UNKNOWN\n" for name in self._nodes
        )
        return f"""ClusterName=test
SlurmctldHost={CONTROLLER}({self.addresses[CONTROLLER]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%h
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%h.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SlurmdTimeout=60
MessageTimeout=10
TCPTimeout=2
KillWait=5
MinJobAge=3600
ReturnToService=2
{nodes}PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
