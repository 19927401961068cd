"""Connections that break, and packets that get lost: `ss` and `iptables`, where this machine has them and lets us.

Both are tried out on a connection of our own before anybody else's is touched.
"""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from chaos.processes import Connection

Direction = Literal["both", "from", "to"]
"""Packets lost both ways, those from the worker, or those to it."""

CHAIN = "MULTIWORLD_CHAOS"
_HOOKS = ("INPUT", "OUTPUT")
_TOOL_S = 10.0
_TRIAL_S = 0.5


def destroy(connections: Iterable[Connection]) -> None:
    """Abort these connections at both ends, as a router that lost its state does."""
    for found in connections:
        # ss complains about what it finds in other tables although it did what it was told, so its status says nothing.
        _run(
            *("ss", "-K", "-t", "src", found.local_host, "dst", found.remote_host),
            *("sport", "=", f":{found.local_port}", "dport", "=", f":{found.remote_port}"),
            check=False,
        )


@contextlib.contextmanager
def lost_packets(connections: Sequence[Connection], direction: Direction = "both") -> Iterator[None]:
    """What travels on these connections is lost while the block runs, and so is every attempt to make a new one in their stead.

    Workers of one leader all connect to the same port, so that nobody else can join either until it heals.
    """
    _remove_chain()
    try:
        _run("iptables", "-w", "-N", CHAIN)
        for rule in drop_rules(connections, direction):
            _run("iptables", "-w", "-A", CHAIN, *rule)
        for hook in _HOOKS:
            _run("iptables", "-w", "-I", hook, "-j", CHAIN)
        yield
    finally:
        _remove_chain()


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


def _rule(source: tuple[str, str], target: tuple[str, str]) -> list[str]:
    return ["-p", "tcp", "-s", source[0], "--sport", source[1], "-d", target[0], "--dport", target[1], "-j", "DROP"]


def _remove_chain() -> None:
    """Also what an earlier run left behind that was killed in the middle."""
    for hook in _HOOKS:
        while _run("iptables", "-w", "-D", hook, "-j", CHAIN, check=False) == 0:
            pass
    _run("iptables", "-w", "-F", CHAIN, check=False)
    _run("iptables", "-w", "-X", CHAIN, check=False)


def _run(*command: str, check: bool = True) -> int:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S, check=False)  # noqa: S603
    if check and done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.returncode


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
