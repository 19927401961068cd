"""The catalogue of faults: what each does, to whom, and what a sound service makes of it."""

import asyncio
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import httpx

from chaos import network
from chaos.scene import Scene

Scope = Literal["one", "two", "stage", "all", "nobody"]
"""Who is hurt: one replica, one in each of two stages, all of a stage, all there are, or no worker at all."""

BREAKS = frozenset({"exit", "hang", "transport", "error", "left", "timeout", "aborted"})
HOLD_S = 2.0
"""How long a fault stays after it was noticed, so that what comes back comes back late."""
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
        does: what is done, for people.
        inject: does it, and undoes what can be undone.
        causes: how the victims' worlds may break; empty when they must not, None when both will do.
        why_not: why it cannot be done on this machine; empty when it can.
    """

    name: str
    does: str
    scope: Scope
    inject: Callable[[Scene], None]
    causes: frozenset[str] | None
    why_not: Callable[[], str] = _always


def _kill(scene: Scene) -> None:
    scene.signal(signal.SIGKILL)


def _freeze(scene: Scene) -> None:
    with scene.stopped():
        scene.wait_broken()
        scene.hold(HOLD_S)


def _pause(scene: Scene) -> None:
    with scene.stopped():
        scene.hold(scene.heartbeat_timeout_s / 2)


def _leave(scene: Scene) -> None:
    scene.signal(signal.SIGTERM)


def _slow(scene: Scene) -> None:
    with scene.processes() as processes:
        processes[0].crawl(SLOW_S, share=SLOW_SHARE)


def _reset(scene: Scene) -> None:
    with scene.processes() as processes:
        network.destroy(connection for process in processes for connection in process.connections())


def _cut(direction: network.Direction) -> Callable[[Scene], None]:
    def cut(scene: Scene) -> None:
        with scene.processes() as processes:
            connections = [connection for process in processes for connection in process.connections()]
        with network.lost_packets(connections, direction):
            scene.wait_broken()
            scene.hold(HOLD_S)

    return cut


def _memory(scene: Scene) -> None:
    """A worker that serves needs no new memory, for it warmed up with the largest batch. One that has to join again does."""
    with scene.processes() as processes, processes[0].without_memory():
        with scene.stopped():
            scene.wait_broken()
        scene.hold(MEMORY_S)
        if not scene.observer.now.replicas[scene.victims[0].place].ready:
            return
    scene.surprises.append("it joined and served again although it could allocate no memory")


def _flap(scene: Scene) -> None:
    """Killed, and again as soon as the place serves, three times in all."""
    victims = list(scene.victims)
    for left in (2, 1, 0):
        scene.signal(signal.SIGKILL, victims)
        scene.wait_broken(victims)
        if left:
            now = scene.wait_complete()
            victims = [now.replicas[victim.place] for victim in victims]


def _kill_joining(scene: Scene) -> None:
    """Killed, and its successor too while it joins, is given its weights or warms up."""
    (victim,) = scene.victims
    scene.signal(signal.SIGKILL)
    scene.wait_broken()
    successor = scene.wait_rejoining(victim.place, victim.epoch)
    if successor.ready:
        scene.surprises.append("it served again before it could be killed while joining")
    scene.signal(signal.SIGKILL, [successor])
    scene.wait_broken([successor])


def _two(scene: Scene) -> None:
    """One is killed and the other stopped at the same time."""
    killed, frozen = scene.victims
    with scene.stopped([frozen]):
        scene.signal(signal.SIGKILL, [killed])
        scene.wait_broken()


def _stage_stopped(scene: Scene) -> None:
    with scene.stopped():
        scene.hold(STAGE_STOPPED_S)


def _disconnect(scene: Scene) -> None:
    """Clients that hang up in the middle: when the image is being decoded, waits, or is being computed."""

    async def hang_up() -> None:
        async with httpx.AsyncClient(**scene.target.way_in.options) as client:
            for after_s in DISCONNECT_AFTER_S:
                requests = [asyncio.create_task(_post(client, scene, {})) for _ in range(CLIENTS // 4)]
                await asyncio.sleep(after_s)
                for request in requests:
                    request.cancel()
                await asyncio.gather(*requests, return_exceptions=True)

    asyncio.run(hang_up())


def _deadline(scene: Scene) -> None:
    """Requests whose time is over while their image arrives, is decoded, waits or is being computed."""

    async def ask() -> list[int]:
        async with httpx.AsyncClient(timeout=30.0, **scene.target.way_in.options) as client:
            headers = ({"x-request-timeout-s": str(DEADLINES_S[n % len(DEADLINES_S)])} for n in range(CLIENTS))
            return await asyncio.gather(*(_post(client, scene, header) for header in headers))

    # 408 when the time was over before all of the body had come; 200 when this service is as fast as that.
    statuses = Counter(asyncio.run(ask()))
    if not statuses[504]:
        scene.surprises.append(f"no request with a tiny deadline got 504, but {dict(statuses)}")
    elif others := {status: n for status, n in statuses.items() if status not in (504, 408, 200)}:
        scene.surprises.append(f"requests with tiny deadlines got {others}, expected 504")


async def _post(client: httpx.AsyncClient, scene: Scene, headers: dict[str, str]) -> int:
    question = scene.question
    headers = {"content-type": question.content_type, **headers}
    answer = await client.post(f"{scene.target.url}/predict", content=question.body, headers=headers)
    return answer.status_code


_GONE = frozenset({"exit"})
_SILENT = frozenset({"hang"})
_CUT = frozenset({"exit", "hang", "transport", "aborted", "timeout"})
_UNHURT: frozenset[str] = frozenset()

CATALOGUE: tuple[Fault, ...] = (
    Fault("kill", "SIGKILL", "one", _kill, _GONE),
    Fault("freeze", f"SIGSTOP until it is given up and {HOLD_S:g} s more, then it comes back", "one", _freeze, _SILENT),
    Fault("pause", "SIGSTOP for half the heartbeat timeout", "one", _pause, _UNHURT),
    Fault("leave", "SIGTERM: it says goodbye and goes", "one", _leave, frozenset({"left"})),
    Fault("slow", f"runs for {SLOW_SHARE:.0%} of the time, {SLOW_S:g} s long", "one", _slow, _UNHURT),
    Fault("reset", "its connections are destroyed", "one", _reset, _CUT, network.why_not_destroy),
    Fault("cut", "its packets are lost both ways, and heal", "one", _cut("both"), _CUT, network.why_not_lose),
    Fault("cut-from", "packets from it are lost, and heal", "one", _cut("from"), _CUT, network.why_not_lose),
    Fault("cut-to", "packets to it are lost, and heal", "one", _cut("to"), _CUT, network.why_not_lose),
    Fault(
        "memory", f"given up, and then can allocate no memory to join again for {MEMORY_S:g} s", "one", _memory, _SILENT
    ),
    Fault("flap", "SIGKILL three times, each as soon as it is back", "one", _flap, _GONE),
    Fault("kill-joining", "SIGKILL, and its successor too while it joins", "one", _kill_joining, _GONE | {"aborted"}),
    Fault("two", "in two stages at once: one killed, one stopped", "two", _two, _GONE | _SILENT),
    Fault("stage", "SIGKILL of all replicas of a stage", "stage", _kill, _GONE),
    Fault("stage-stopped", f"all replicas of a stage stop for {STAGE_STOPPED_S:g} s", "stage", _stage_stopped, _SILENT),
    Fault("all", "SIGKILL of every worker", "all", _kill, _GONE),
    Fault("disconnect", f"{CLIENTS} further clients hang up in the middle", "nobody", _disconnect, _UNHURT),
    Fault("deadline", f"{CLIENTS} further requests with 1 to 50 ms of time get 504", "nobody", _deadline, _UNHURT),
)


def fault(name: str) -> Fault:
    """The fault of this name. Raises KeyError."""
    return {fault.name: fault for fault in CATALOGUE}[name]
