"""Connections that break, packets that get lost, and links that are narrow: `ss`, `iptables` and `tc`, where this machine has them
and lets us.

They are tried out on what is our own before anybody else's is touched. What a process in a container has of the network is hurt in
there, so that nobody else is.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Literal

from chaos.processes import Connection

Direction = Literal["both", "from", "to"]
"""Packets lost both ways, those from the worker, or those to it."""

CHAIN = "MULTIWORLD_CHAOS"
_HOOKS = ("INPUT", "OUTPUT")
_TOOL_S = 10.0
_TRIAL_S = 0.5
_TOKEN_BUCKET = ("burst", "8kb", "latency", "50ms")
"""What may pass at once, and how long the rest waits at the most before it is dropped: as a switch with small buffers."""


def destroy(connections: Iterable[Connection], pid: int | None = None) -> None:
    """Abort these connections at both ends, as a router that lost its state does; at one end if the other is on another network.

    Args:
        pid: of the process whose they are; this one if None.
    """
    for found in connections:
        # ss complains about what it finds in other tables although it did what it was told, so its status says nothing.
        _run(
            *("ss", "-K", "-t", "src", found.local_host, "dst", found.remote_host),
            *("sport", "=", f":{found.local_port}", "dport", "=", f":{found.remote_port}"),
            check=False,
            pid=pid,
        )


@contextlib.contextmanager
def lost_packets(
    connections: Sequence[Connection], direction: Direction = "both", pid: int | None = None
) -> Iterator[None]:
    """What travels on these connections is lost while the block runs, and so is every attempt to make a new one in their stead.

    Workers of one leader all connect to the same port, so that nobody else on the same network can join either until it heals.

    Args:
        pid: of the process whose they are; this one if None.
    """
    _remove_chain(pid)
    try:
        _run("iptables", "-w", "-N", CHAIN, pid=pid)
        for rule in drop_rules(connections, direction):
            _run("iptables", "-w", "-A", CHAIN, *rule, pid=pid)
        for hook in _HOOKS:
            _run("iptables", "-w", "-I", hook, "-j", CHAIN, pid=pid)
        yield
    finally:
        _remove_chain(pid)


@contextlib.contextmanager
def narrow(pid: int, bits_per_s: int) -> Iterator[Callable[[], int]]:
    """The network interfaces of a container carry so much each way, and no more, while the block runs.

    Args:
        pid: of a process in it.

    Yields what tells how many times something had to wait so far.
    """
    shape = ("root", "tbf", "rate", f"{bits_per_s}bit", *_TOKEN_BUCKET)
    found = json.loads(_output("ip", "-json", "link", "show", "type", "veth", pid=pid))
    if not found or not _within(pid):
        raise OSError(f"process {pid} has no network of its own to be made narrow")
    # What leaves an interface can be held back. What comes to it leaves the other end of the pair, which is ours.
    ends: list[tuple[str, int | None]] = [(link["ifname"], pid) for link in found]
    ends += [(socket.if_indextoname(link["link_index"]), None) for link in found]
    with ExitStack() as stack:
        for device, of in ends:
            _run("tc", "qdisc", "add", "dev", device, *shape, pid=of)
            # Gone with the interface, if that goes first.
            stack.callback(_run, "tc", "qdisc", "del", "dev", device, "root", check=False, pid=of)
        yield lambda: sum(_held_back(device, of) for device, of in ends)


def drop_rules(connections: Iterable[Connection], direction: Direction) -> list[list[str]]:
    """The arguments of iptables that lose the packets of these connections. Pure.

    Of a new connection, the first packet is lost on the way out, or its answer on the way back.
    """
    rules, servers = [], set()
    for local_host, local_port, remote_host, remote_port in connections:
        local, remote = (local_host, str(local_port)), (remote_host, str(remote_port))
        if direction in ("both", "from"):
            rules.append(_rule(local, remote))
        if direction in ("both", "to"):
            rules.append(_rule(remote, local))
        servers.add(remote)
    for host, port in sorted(servers):
        if direction in ("both", "from"):
            rules.append(["-p", "tcp", "--syn", "-d", host, "--dport", port, "-j", "DROP"])
        else:
            rules.append(["-p", "tcp", "--tcp-flags", "SYN,ACK", "SYN,ACK", "-s", host, "--sport", port, "-j", "DROP"])
    return rules


def why_not_destroy() -> str:
    """Why connections cannot be destroyed here; empty when they can."""
    if not shutil.which("ss"):
        return "the program `ss` (package iproute2) is not here"
    if os.geteuid() != 0:
        return "destroying connections needs root"
    with _own_connection() as (client, server, connection):
        destroy([connection])
        return "the kernel does not let `ss -K` destroy connections" if _arrives(client, server) else ""


def why_not_lose() -> str:
    """Why packets cannot be lost here; empty when they can."""
    if not shutil.which("iptables"):
        return "the program `iptables` is not here"
    if os.geteuid() != 0:
        return "dropping packets needs root"
    try:
        with _own_connection() as (client, server, connection), lost_packets([connection]):
            return "iptables takes its rules and packets come through all the same" if _arrives(client, server) else ""
    except (OSError, subprocess.SubprocessError) as error:
        return f"iptables does not work here: {error}"


def why_not_narrow() -> str:
    """Why a network cannot be made narrow here; empty when it can."""
    for program in ("tc", "ip", "nsenter", "unshare"):
        if not shutil.which(program):
            return f"the program `{program}` is not here"
    if os.geteuid() != 0:
        return "making a network narrow needs root"
    try:
        _run("unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "8mbit", *_TOKEN_BUCKET)
    except (OSError, subprocess.SubprocessError) as error:
        return f"tc does not work here: {error}"
    return ""


def _held_back(device: str, pid: int | None) -> int:
    queues = json.loads(_output("tc", "-json", "-statistics", "qdisc", "show", "dev", device, "root", pid=pid))
    return sum(int(queue.get("overlimits", 0)) for queue in queues)


def _rule(source: tuple[str, str], target: tuple[str, str]) -> list[str]:
    return ["-p", "tcp", "-s", source[0], "--sport", source[1], "-d", target[0], "--dport", target[1], "-j", "DROP"]


def _remove_chain(pid: int | None) -> None:
    """Also what an earlier run left behind that was killed in the middle."""
    for hook in _HOOKS:
        while _run("iptables", "-w", "-D", hook, "-j", CHAIN, check=False, pid=pid) == 0:
            pass
    _run("iptables", "-w", "-F", CHAIN, check=False, pid=pid)
    _run("iptables", "-w", "-X", CHAIN, check=False, pid=pid)


def _within(pid: int | None) -> tuple[str, ...]:
    """What runs a command in the network of that process, if it is another than ours."""
    if pid is None or os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        return ()
    return ("nsenter", f"--net=/proc/{pid}/ns/net")


def _run(*command: str, check: bool = True, pid: int | None = None) -> int:
    """The exit status. Raises OSError unless that is 0, if `check`."""
    try:
        within = _within(pid)
    except FileNotFoundError:  # its process has ended, and its network with it
        if check:
            raise
        return 1
    done = subprocess.run(  # noqa: S603
        (*within, *command), capture_output=True, text=True, timeout=_TOOL_S, check=False
    )
    if check and done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.returncode


def _output(*command: str, pid: int | None) -> str:
    """What it writes to its standard output. Raises OSError."""
    done = subprocess.run(  # noqa: S603
        (*_within(pid), *command), capture_output=True, text=True, timeout=_TOOL_S, check=False
    )
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def _own_connection() -> Iterator[tuple[socket.socket, socket.socket, Connection]]:
    """Both ends of a connection within this process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address, timeout=_TRIAL_S) as client, listener.accept()[0] as server:
            server.settimeout(_TRIAL_S)
            yield client, server, Connection(*client.getsockname(), *address)


def _arrives(client: socket.socket, server: socket.socket) -> bool:
    """Whether what one end sends comes out at the other."""
    try:
        client.sendall(b"x")
        return server.recv(1) == b"x"
    except OSError:
        return False
