"""The actor that owns one process of a service: it starts the process, restarts it, and tells it where the leaders are.

The process is a child of the actor, which supervises it exactly as on one machine: it is restarted at once when it ends, is killed when it
is blocked, and ends with the actor. Ray starts the actor again when it or its node is lost, perhaps on another node; a leader then has
another address. Every worker and frontend therefore has a file of leaders' addresses, which its actor keeps up to date.
"""

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import ray

from multiworld_serving.common.config.addresses import Address
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.logs import configure_logging
from multiworld_serving.common.config.process import raise_descriptor_limit
from multiworld_serving.common.config.sources import option
from multiworld_serving.common.http.listener import bind, stop_listening
from multiworld_serving.deploy.ray.placement import NodeResources
from multiworld_serving.server.supervisor.notify import NotifyListener
from multiworld_serving.server.supervisor.programs import Process, Role, Starter, Values

logger = logging.getLogger(__name__)

_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_LOOK_UP_S = 1.0
"""Pause between two questions for a leader's address."""
_ANSWER_S = 10.0
"""Longest wait for its answer. While a leader's actor is started again, there is none."""


@dataclass(frozen=True)
class ProcessSpec:
    """One process. It travels to the node as the argument of the actor's constructor, which Ray shows to nobody.

    Attributes:
        need: what Ray reserves for it.
        values: its settings; secrets are `SecretStr`, so that no log shows them.
        timeouts_s: see the function `timeouts_s`.
        models: of a frontend: the settings that each model has of its own.
        sockets: sockets that it inherits: for the setting that takes the descriptor, host and port.
        leaders: for each model, names of the leaders' actors that it joins, in this namespace.
    """

    role: Role
    name: str
    need: NodeResources
    values: Values
    namespace: str
    timeouts_s: tuple[float, float]
    models: Mapping[str, Values] = field(default_factory=dict)
    sockets: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    leaders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class ProcessState(NamedTuple):
    """What the actor knows of its process.

    Attributes:
        host: name of the node.
        started: the process has sent a sign of life: a leader or frontend listens.
        cannot_start: it cannot start with its settings on this node, or ends again and again.
        addresses: where it listens, by the setting of the socket.
    """

    host: str
    started: bool
    cannot_start: bool
    addresses: Mapping[str, str]


class ProcessActor:
    """Runs one process until `stop`. If the supervision itself fails, the actor ends, and Ray starts it again."""

    def __init__(self, spec: ProcessSpec) -> None:
        configure_logging(spec.values["log_level"], spec.values["log_format"], process=spec.name)  # type: ignore[arg-type]
        raise_descriptor_limit()
        self._spec = spec
        self._node_address = ray.util.get_node_ip_address()
        node = ray.get_runtime_context().get_node_id()
        self._host = next(str(each["NodeName"]) for each in ray.nodes() if each["NodeID"] == node)
        """The name of this node in `ray status`; by default its address."""
        self._stop = asyncio.Event()
        self._stack = contextlib.ExitStack()
        self._notify = self._stack.enter_context(NotifyListener())
        self._leaders: dict[str, str] = {}
        self._leaders_fds = {model: os.memfd_create("leaders") for model in spec.leaders}
        self._leader_known = asyncio.Event()
        self._sockets = {
            name: _listen(self._bind_host(host), port, reserve=name == "grpc_fd")
            for name, (host, port) in spec.sockets.items()
        }
        self._write_leaders()
        fds = {name: sock.fileno() for name, sock in self._sockets.items()}
        values = {**spec.values, "name": spec.name, **self._local_values()}
        process = Process(spec.name, values, fds, int(spec.need.cores))
        self._supervisor = Starter(self._notify).supervisor(spec.role, 1, lambda _: process, spec.timeouts_s)
        self._loop = asyncio.new_event_loop()
        # The kernel ends the process with the thread that started it, so this thread lives as long as the actor.
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return self._spec.name  # Ray puts it before every line of the log

    def state(self) -> ProcessState:
        """What the actor knows of its process now."""
        pid = self._supervisor.pids.get(0)
        return ProcessState(
            self._host,
            pid is not None and self._notify.heard(pid),
            self._supervisor.cannot_start.is_set(),
            {name: self._address(name) for name in self._sockets},
        )

    def stop(self) -> None:
        """Stop the process: SIGTERM, and SIGKILL after the stop timeout. Returns when it has ended."""
        for event in (self._stop, self._leader_known):
            self._loop.call_soon_threadsafe(event.set)
        self._thread.join()

    # -- the thread of the supervisor ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._supervise())
        except BaseException:
            logger.exception("the supervision of %s has failed: this actor ends", self._spec.name)
            os._exit(1)

    async def _supervise(self) -> None:
        with self._stack, self._notify.receiving(), contextlib.ExitStack() as lookups:
            for name in chain.from_iterable(self._spec.leaders.values()):
                lookups.callback(asyncio.create_task(self._look_up(name)).cancel)
            if self._spec.leaders:
                await self._leader_known.wait()
            if not self._stop.is_set():
                async with self._supervisor:
                    await self._stop.wait()
                    if "http_fd" in self._sockets:
                        await stop_listening(self._sockets["http_fd"])

    def _local_values(self) -> Values:
        """The settings that depend on the node."""
        hosts = {name: self._bind_host(host) for name, (host, _) in self._spec.sockets.items()}
        values: Values = {name: sock.fileno() for name, sock in self._sockets.items()}
        if self._spec.role == "leader":
            # Workers and frontends join at the address of the node, also if the leader listens on all.
            return {**values, "join_host": hosts["join_fd"], "advertise_host": self._address("join_fd")}
        files = {model: f"/proc/{os.getpid()}/fd/{fd}" for model, fd in self._leaders_fds.items()}
        values["leaders_file"] = next(iter(files.values()))
        if self._spec.role == "worker":
            return {**values, "bind_host": self._node_address, "advertise_host": self._host}
        models = {model: {**own, "leaders_file": files[model]} for model, own in self._spec.models.items()}
        return {**values, "model_settings": models, "host": hosts["http_fd"], "admin_host": hosts["admin_fd"]}

    def _address(self, name: str) -> str:
        """Where this socket listens."""
        return str(Address(self._node_address, self._sockets[name].getsockname()[1]))

    def _bind_host(self, host: str) -> str:
        """The address to listen on: the host of the settings if other nodes can reach it, else the address of the node."""
        return self._node_address if host in _LOOPBACK else host

    # -- addresses of leaders --------------------------------------------------------------------------------------------------

    async def _look_up(self, name: str) -> None:
        """Ask the actor of a leader for its address, again and again, because it may move. It keeps its last address until then."""
        actor: Any = None
        while True:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    if actor is None:
                        actor = await asyncio.to_thread(ray.get_actor, name, self._spec.namespace)
                    state: ProcessState = await actor.state.remote()
                self._on_address(name, state.addresses["join_fd"])
            except (ray.exceptions.RayError, ValueError, TimeoutError) as error:
                logger.debug("the address of %s is not known: %s", name, error)
            await asyncio.sleep(_LOOK_UP_S)

    def _on_address(self, name: str, address: str) -> None:
        if self._leaders.get(name) == address:
            return
        logger.info("%s is at %s", name, address)
        self._leaders[name] = address
        self._write_leaders()
        self._leader_known.set()

    def _write_leaders(self) -> None:
        """Replace the file of each model's leaders at once, so that a process never reads a part of it."""
        for model, leaders in self._spec.leaders.items():
            # The name of a leader that was never reached cannot be resolved (RFC 2606), so the process tries again later.
            lines = [self._leaders.get(name, f"{name}.invalid:1") for name in leaders]
            with os.fdopen(os.memfd_create("leaders"), "w") as file:
                file.write("\n".join(lines) + "\n")
                file.flush()
                os.dup2(file.fileno(), self._leaders_fds[model], inheritable=False)


def _listen(host: str, port: int, *, reserve: bool) -> socket.socket:
    """The socket of this port (see `bind`), or of a free one if another process of this node uses it."""
    try:
        return bind(host, port, option("port"), reserve=reserve)
    except UserError as error:
        if not port:
            raise
        logger.warning("%s: using a free port", error)
        return bind(host, 0, option("port"), reserve=reserve)
