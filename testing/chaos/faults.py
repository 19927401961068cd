"""The catalogue of faults on processes and clients: action, targets and expected effect."""

import asyncio
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import httpx

from multiworld_serving.testing.chaos import network
from multiworld_serving.testing.chaos.fault_context import FaultContext

Scope = Literal["one", "two", "stage", "all", "none", "leader"]
"""Targets: one replica, one replica in each of two stages, all replicas of a stage, all workers, no worker, or the leader."""

BREAKS = frozenset({"exit", "hang", "stalled", "transport", "error", "left", "timeout", "local", "aborted"})
HOLD_S = 2.0
"""How long a fault lasts after its detection, so that delayed messages arrive late."""
STAGE_STOPPED_S = 5.0
SLOW_S = 4.0
SLOW_SHARE = 0.1
MEMORY_S = 3.0
CLIENTS = 32
DISCONNECT_AFTER_S = (0.005, 0.02, 0.05, 0.1)
DEADLINES_S = (0.001, 0.02, 0.05)


def _always() -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault.

    Attributes:
        description: what is done, for the table of `--list`.
        inject: injects the fault and reverts it where possible.
        causes: allowed causes of broken worlds of the targets; empty if no world may break, None if any outcome is allowed.
        unavailable_reason: returns why the fault is not possible on this machine; empty if it is.
        of: what the fault acts on: processes or containers.
    """

    name: str
    description: str
    scope: Scope
    inject: Callable[[FaultContext], None]
    causes: frozenset[str] | None
    unavailable_reason: Callable[[], str] = _always
    of: Literal["process", "container"] = "process"


def _kill(context: FaultContext) -> None:
    context.signal(signal.SIGKILL)


def _freeze(context: FaultContext) -> None:
    with context.stopped():
        context.wait_broken()
        context.hold(HOLD_S)


def _pause(context: FaultContext) -> None:
    with context.stopped():
        context.hold(context.heartbeat_timeout_s / 2)


def _leave(context: FaultContext) -> None:
    context.signal(signal.SIGTERM)


def _slow(context: FaultContext) -> None:
    with context.processes() as processes:
        processes[0].throttle(SLOW_S, share=SLOW_SHARE)


def _reset(context: FaultContext) -> None:
    with context.processes() as processes:
        for process in processes:
            network.destroy_connections(process.connections(), process.pid)


def _cut(direction: network.Direction) -> Callable[[FaultContext], None]:
    def cut(context: FaultContext) -> None:
        with context.processes() as processes:
            connections = [connection for process in processes for connection in process.connections()]
        with network.drop_packets(connections, direction, processes[0].pid):
            context.wait_broken()
            context.hold(HOLD_S)

    return cut


def _memory(context: FaultContext) -> None:
    """A serving worker allocates no memory: it warmed up with the largest batch. A worker that rejoins does."""
    with context.processes() as processes, processes[0].without_memory():
        with context.stopped():
            context.wait_broken()
        context.hold(MEMORY_S)
        if not context.observer.now.replicas[context.targets[0].key].ready:
            return
    context.unexpected.append("the worker rejoined although it could not allocate memory")


def _flap(context: FaultContext) -> None:
    """Kill the worker three times, each time as soon as its slot is ready again."""
    targets = list(context.targets)
    for left in (2, 1, 0):
        context.signal(signal.SIGKILL, targets)
        context.wait_broken(targets)
        if left:
            now = context.wait_complete()
            targets = [now.replicas[target.key] for target in targets]


def _kill_joining(context: FaultContext) -> None:
    """Kill the worker, and its successor while it joins, receives weights or warms up."""
    (target,) = context.targets
    context.signal(signal.SIGKILL)
    context.wait_broken()
    successor = context.wait_rejoining(target.key, target.epoch)
    if successor.ready:
        context.unexpected.append("the successor was ready before it could be killed while joining")
    context.signal(signal.SIGKILL, [successor])
    context.wait_broken([successor])


def _two(context: FaultContext) -> None:
    """Kill one target and stop the other at the same time."""
    killed, frozen = context.targets
    with context.stopped([frozen]):
        context.signal(signal.SIGKILL, [killed])
        context.wait_broken()


def _stage_stopped(context: FaultContext) -> None:
    with context.stopped():
        context.hold(STAGE_STOPPED_S)


def _disconnect(context: FaultContext) -> None:
    """Clients disconnect while their image is decoded, queued or computed."""

    async def disconnect() -> None:
        async with httpx.AsyncClient(**context.system.credentials.options) as client:
            for after_s in DISCONNECT_AFTER_S:
                requests = [asyncio.create_task(_post(client, context, {})) for _ in range(CLIENTS // 4)]
                await asyncio.sleep(after_s)
                for request in requests:
                    request.cancel()
                await asyncio.gather(*requests, return_exceptions=True)

    asyncio.run(disconnect())


def _deadline(context: FaultContext) -> None:
    """The deadline of requests passes while their image is received, decoded, queued or computed."""

    async def ask() -> list[int]:
        async with httpx.AsyncClient(timeout=30.0, **context.system.credentials.options) as client:
            headers = ({"x-request-timeout-s": str(DEADLINES_S[n % len(DEADLINES_S)])} for n in range(CLIENTS))
            return await asyncio.gather(*(_post(client, context, header) for header in headers))

    # 408: the deadline passed before the body was received. 200: the service was fast enough.
    statuses = Counter(asyncio.run(ask()))
    if not statuses[504]:
        context.unexpected.append(f"no request with a short deadline got 504; statuses: {dict(statuses)}")
    elif others := {status: n for status, n in statuses.items() if status not in (504, 408, 200)}:
        context.unexpected.append(f"requests with short deadlines got {others}, expected 504")


async def _post(client: httpx.AsyncClient, context: FaultContext, headers: dict[str, str]) -> int:
    request = context.request
    headers = {"content-type": request.content_type, **headers}
    answer = await client.post(f"{context.system.url}/predict", content=request.body, headers=headers)
    return answer.status_code


EXIT_CAUSES = frozenset({"exit"})
HANG_CAUSES = frozenset({"hang"})
PARTITION_CAUSES = frozenset({"exit", "hang", "transport", "aborted", "timeout"})
NO_CAUSES: frozenset[str] = frozenset()

CATALOGUE: tuple[Fault, ...] = (
    Fault("kill", "SIGKILL", "one", _kill, EXIT_CAUSES),
    Fault(
        "freeze",
        f"SIGSTOP until the leader detects it and {HOLD_S:g} s more, then SIGCONT",
        "one",
        _freeze,
        HANG_CAUSES,
    ),
    Fault("pause", "SIGSTOP for half the heartbeat timeout", "one", _pause, NO_CAUSES),
    Fault("leave", "SIGTERM: the worker leaves", "one", _leave, frozenset({"left"})),
    Fault("slow", f"throttled to {SLOW_SHARE:.0%} CPU time for {SLOW_S:g} s", "one", _slow, NO_CAUSES),
    Fault("reset", "its TCP connections are reset", "one", _reset, PARTITION_CAUSES, network.reset_unavailable_reason),
    Fault(
        "cut",
        "packets to and from it are dropped, then restored",
        "one",
        _cut("both"),
        PARTITION_CAUSES,
        network.packet_loss_unavailable_reason,
    ),
    Fault(
        "cut-from",
        "packets from it are dropped, then restored",
        "one",
        _cut("from"),
        PARTITION_CAUSES,
        network.packet_loss_unavailable_reason,
    ),
    Fault(
        "cut-to",
        "packets to it are dropped, then restored",
        "one",
        _cut("to"),
        PARTITION_CAUSES,
        network.packet_loss_unavailable_reason,
    ),
    Fault(
        "memory",
        f"SIGSTOP until detected, then no memory allocation for {MEMORY_S:g} s",
        "one",
        _memory,
        HANG_CAUSES,
    ),
    Fault("flap", "SIGKILL three times, each as soon as the slot is ready", "one", _flap, EXIT_CAUSES),
    Fault(
        "kill-joining",
        "SIGKILL, and SIGKILL of its successor while it joins",
        "one",
        _kill_joining,
        EXIT_CAUSES | {"aborted"},
    ),
    Fault("two", "one worker in each of two stages: one killed, one stopped", "two", _two, EXIT_CAUSES | HANG_CAUSES),
    Fault("stage", "SIGKILL of all replicas of a stage", "stage", _kill, EXIT_CAUSES),
    Fault(
        "stage-stopped",
        f"SIGSTOP of all replicas of a stage for {STAGE_STOPPED_S:g} s",
        "stage",
        _stage_stopped,
        HANG_CAUSES,
    ),
    Fault("all", "SIGKILL of every worker", "all", _kill, EXIT_CAUSES),
    Fault(
        "disconnect", f"{CLIENTS} additional clients disconnect during their request", "none", _disconnect, NO_CAUSES
    ),
    Fault(
        "deadline", f"{CLIENTS} additional requests with deadlines of 1 to 50 ms get 504", "none", _deadline, NO_CAUSES
    ),
)


def fault(name: str) -> Fault:
    """Return the fault of this name. Raises KeyError."""
    return {fault.name: fault for fault in CATALOGUE}[name]
