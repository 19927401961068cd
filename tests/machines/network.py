"""Hosts for tests: network namespaces with their own addresses, connected by a switch in another namespace.

Nothing of this machine's own network is changed, and no packet leaves the namespaces. They are removed at the end of their block; those
of a killed run are removed by the next run.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from typing import Self

import pytest

_CLONE_NEWNET = 0x40000000
_RUN = "/run/netns"
_PREFIX = "mwtest"
_COMMAND_S = 60.0

_libc = ctypes.CDLL(None, use_errno=True)


def need_namespaces() -> None:
    """Skip the test if network namespaces cannot be created, and say what is missing."""
    if why := _why_not():
        pytest.skip(why)


def _why_not() -> str:
    for program in ("ip", "iptables"):
        if shutil.which(program) is None:
            return f"the program `{program}` is not here: apt-get install iproute2 iptables"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Network() as network:
            host = network.host("probe", "10.213.0.1/24")
            host.run("iptables", "-w", "-A", "INPUT", "-p", "tcp", "--dport", "9", "-j", "DROP")
    except (subprocess.CalledProcessError, OSError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        return f"network namespaces cannot be used here: {said}"
    return ""


class Host:
    """One machine: a network namespace. Its interfaces have the names of their networks."""

    def __init__(self, name: str, namespace: str) -> None:
        self.name = name
        self.namespace = namespace

    def run(self, *command: str) -> str:
        """Run a command on this host and return its output. Raises subprocess.CalledProcessError."""
        return _run("ip", "netns", "exec", self.namespace, *command)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Move this thread, and all threads and processes that it starts, to this host while the block runs."""
        own = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
        there = os.open(f"{_RUN}/{self.namespace}", os.O_RDONLY)
        try:
            _set_namespace(there)
            try:
                yield
            finally:
                _set_namespace(own)
        finally:
            os.close(own)
            os.close(there)

    @contextlib.contextmanager
    def losing(self, *rules: str) -> Iterator[None]:
        """Silently drop packets that match an iptables rule (`INPUT -s 10.0.0.1`) at this host while the block runs."""
        try:
            for rule in rules:
                self.run("iptables", "-w", "-A", *rule.split(), "-j", "DROP")
            yield
        finally:
            self.run("iptables", "-w", "-F")

    def forward(self) -> None:
        """Forward packets for other hosts, like a router."""
        self.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def lost_packets(self) -> int:
        """Number of packets that the rules of `losing` have dropped so far: shows that the fault fired."""
        lines = self.run("iptables", "-w", "-nvxL").splitlines()
        return sum(int(line.split()[0]) for line in lines if " DROP " in f"{line} " and line.split()[0].isdecimal())


class Network:
    """Creates hosts and connects them to networks. Use in a `with` block, which removes everything at its end."""

    def __init__(self) -> None:
        self._hosts: dict[str, Host] = {}
        self._cables = 0

    def __enter__(self) -> Self:
        _sweep()
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts.values():  # veth pairs are removed with either end
            _run("ip", "netns", "del", host.namespace, check=False)

    def host(self, name: str, address: str = "", *, network: str = "lan", gateway: str = "") -> Host:
        """A new host, connected to `network` with this address ("10.0.0.1/24") if one is given."""
        host = self._make(name)
        if address:
            self.plug(host, address, network)
        if gateway:
            host.run("ip", "route", "add", "default", "via", gateway)
        return host

    def plug(self, host: Host, address: str, network: str = "lan") -> None:
        """Give a host an interface in this network, with the network's name."""
        switch = self._switch(network)
        self._cables += 1
        port = f"port{self._cables}"
        _run(
            *("ip", "link", "add", network, "netns", host.namespace, "type", "veth"),
            *("peer", "name", port, "netns", switch.namespace),
        )
        switch.run("ip", "link", "set", port, "master", "bridge", "up")
        host.run("ip", "address", "add", address, "dev", network)
        host.run("ip", "link", "set", network, "up")

    def router(self, name: str, outside: str, inside: str, *, inner: str) -> Host:
        """A host in two networks ("lan" and `inner`) that hides the inner one behind its outside address."""
        host = self.host(name, outside)
        self.plug(host, inside, inner)
        host.forward()
        host.run("iptables", "-w", "-t", "nat", "-A", "POSTROUTING", "-o", "lan", "-j", "MASQUERADE")
        return host

    def _switch(self, network: str) -> Host:
        name = f"switch-{network}"
        if name not in self._hosts:
            switch = self._make(name)
            switch.run("ip", "link", "add", "bridge", "type", "bridge")
            switch.run("ip", "link", "set", "bridge", "up")
        return self._hosts[name]

    def _make(self, name: str) -> Host:
        namespace = f"{_PREFIX}-{os.getpid()}-{name}"
        _run("ip", "netns", "add", namespace)
        self._hosts[name] = host = Host(name, namespace)
        host.run("ip", "link", "set", "lo", "up")
        return host


def _sweep() -> None:
    """Remove the remains of killed runs."""
    names = os.listdir(_RUN) if os.path.isdir(_RUN) else []
    for name in names:
        prefix, _, rest = name.partition("-")
        pid = rest.partition("-")[0]
        if prefix == _PREFIX and pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
            _run("ip", "netns", "del", name, check=False)


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


def _run(*command: str, check: bool = True) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=check, timeout=_COMMAND_S).stdout
