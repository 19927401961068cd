"""Network faults: resets connections (`ss`) and drops packets (`iptables`).

Each tool is first tried on a connection of this process.
"""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from multiworld_serving.testing.chaos.system.processes import Connection

Direction = Literal["both", "from", "to"]
"""Which packets are dropped: in both directions, from the worker, or to the worker."""

CHAIN = "MULTIWORLD_CHAOS"
_HOOKS = ("INPUT", "OUTPUT")
_TOOL_S = 10.0
_TRIAL_S = 0.5


def destroy_connections(connections: Iterable[Connection]) -> None:
    """Reset these connections at both ends, or at one end if the other is in another network namespace."""
    for found in connections:
        # ss may report errors for other tables although it succeeded, so its exit status is ignored.
        _run(
            *("ss", "-K", "-t", "src", found.local_host, "dst", found.remote_host),
            *("sport", "=", f":{found.local_port}", "dport", "=", f":{found.remote_port}"),
            check=False,
        )


@contextlib.contextmanager
def drop_packets(connections: Sequence[Connection], direction: Direction = "both") -> Iterator[None]:
    """Drop packets of these connections, and connection attempts to the same servers, while the block runs.

    All workers connect to the same port of the leader, so no worker in the same network can join until the block ends.
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
    """Return the iptables arguments that drop the packets of these connections. Pure.

    For new connections, the rules drop the SYN packet, or the SYN-ACK if only packets to the worker are dropped.
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


def _missing_reason(what: str, program: str) -> str:
    """Return that the program is not installed, or that root is needed; empty if neither."""
    if not shutil.which(program):
        return f"the program `{program}` is not installed"
    return f"{what} needs root" if os.geteuid() != 0 else ""


def reset_unavailable_reason() -> str:
    """Return why connections cannot be reset on this machine; empty if they can."""
    if why := _missing_reason("resetting connections", "ss"):
        return why
    with _own_connection() as (client, server, connection):
        destroy_connections([connection])
        return "the kernel does not support `ss -K`" if _arrives(client, server) else ""


def packet_loss_unavailable_reason() -> str:
    """Return why packets cannot be dropped on this machine; empty if they can."""
    if why := _missing_reason("dropping packets", "iptables"):
        return why
    try:
        with _own_connection() as (client, server, connection), drop_packets([connection]):
            return "iptables accepts the rules but packets are not dropped" if _arrives(client, server) else ""
    except (OSError, subprocess.SubprocessError) as error:
        return f"iptables does not work on this machine: {error}"


def _rule(source: tuple[str, str], target: tuple[str, str]) -> list[str]:
    return ["-p", "tcp", "-s", source[0], "--sport", source[1], "-d", target[0], "--dport", target[1], "-j", "DROP"]


def _remove_chain() -> None:
    """Remove the chain, including one left by an earlier run that was killed."""
    for hook in _HOOKS:
        while _run("iptables", "-w", "-D", hook, "-j", CHAIN, check=False).returncode == 0:
            pass
    _run("iptables", "-w", "-F", CHAIN, check=False)
    _run("iptables", "-w", "-X", CHAIN, check=False)


def _run(*command: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    """Run a command. Raises OSError if `check` and it fails."""
    done = subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, timeout=_TOOL_S, check=False
    )
    if check and done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done


@contextlib.contextmanager
def _own_connection() -> Iterator[tuple[socket.socket, socket.socket, Connection]]:
    """Open a connection of this process to itself; yields both ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address, timeout=_TRIAL_S) as client, listener.accept()[0] as server:
            server.settimeout(_TRIAL_S)
            yield client, server, Connection(*client.getsockname(), *address)


def _arrives(client: socket.socket, server: socket.socket) -> bool:
    """Whether a byte sent at one end arrives at the other."""
    try:
        client.sendall(b"x")
        return server.recv(1) == b"x"
    except OSError:
        return False
