"""The catalogue of what is done to containers, and to their leader's. What is done to processes is in `chaos.faults`."""

import contextlib
from collections.abc import Callable

from chaos import network
from chaos.containers import ContainerError, why_no_docker
from chaos.faults import CATALOGUE, CUT, GONE, HOLD_S, SILENT, UNHURT, Fault, Scope
from chaos.scene import WAIT_S, Scene

NARROW_BITS_PER_S = 8_000_000
NARROW_S = 6.0
MORE_WORKERS = 2
_STARVE = "import sys; open(f'/proc/{sys.argv[1]}/oom_score_adj', 'w').write('1000'); b'x' * int(sys.argv[2])"
"""Makes a process the first to be ended, and then takes all the memory that the container may have."""


def _kill(scene: Scene) -> None:
    """Docker takes a container that it was told to kill for stopped on purpose: it is started by hand."""
    container = scene.container(scene.victims[0])
    scene.begin()
    container.do("kill")
    try:
        scene.wait_broken()
    finally:
        container.do("start")


def _out_of_memory(scene: Scene) -> None:
    container = scene.container(scene.victims[0])
    if not container.memory_bytes:
        raise ContainerError(f"container {container.name} has no memory limit")
    inner_pid = str(scene.victims[0].worker).rpartition("-")[2]
    scene.begin()
    with contextlib.suppress(ContainerError):  # who takes the memory is ended with the container
        container.run("python", "-c", _STARVE, inner_pid, str(container.memory_bytes))
    if not scene.project.ran_out_of_memory(container, scene.at_s):
        scene.surprises.append("nobody was ended for want of memory")


def _pause(scene: Scene) -> None:
    container = scene.container(scene.victims[0])
    scene.begin()
    container.do("pause")
    try:
        scene.wait_broken()
        scene.hold(HOLD_S)
    finally:
        container.do("unpause")


def _unplug(scene: Scene) -> None:
    container = scene.container(scene.victims[0])
    scene.begin()
    container.unplug()
    try:
        scene.wait_broken()
        scene.hold(HOLD_S)
    finally:
        with container.addresses_taken():
            container.plug()


def _narrow(scene: Scene) -> None:
    with scene.processes() as processes, network.narrow(processes[0].pid, NARROW_BITS_PER_S) as held_back:
        scene.hold(NARROW_S)
        if not held_back():
            scene.surprises.append("nothing that was sent had to wait")


def _restart_workers(scene: Scene) -> None:
    services = {scene.container(victim).service for victim in scene.victims}
    scene.begin()
    scene.project.compose("restart", *sorted(services))


def _scale(scene: Scene) -> None:
    before = scene.observer.now
    service = scene.container(next(iter(before.replicas.values()))).service
    count = len(scene.project.containers(service))
    scene.begin()
    try:
        _scale_to(scene, service, count + MORE_WORKERS)
        scene.observer.wait(lambda now: now.ready >= before.ready + MORE_WORKERS, WAIT_S, "larger")
        scene.hold(HOLD_S)
    finally:
        _scale_to(scene, service, count)
    scene.observer.wait(lambda now: len(now.replicas) == len(before.replicas), WAIT_S, "as small as before")


def _scale_to(scene: Scene, service: str, count: int) -> None:
    scene.project.compose("up", "--detach", "--no-recreate", "--no-deps", "--scale", f"{service}={count}", service)


def _kill_leader(scene: Scene) -> None:
    leader = scene.project.leader
    scene.begin()
    leader.do("kill")
    try:
        scene.hold(HOLD_S)
    finally:
        leader.do("start")
    scene.wait_leader()


def _restart_leader(scene: Scene) -> None:
    leader = scene.project.leader
    scene.begin()
    scene.project.compose("restart", leader.service)
    scene.wait_leader()


def _fault(
    name: str,
    does: str,
    scope: Scope,
    inject: Callable[[Scene], None],
    causes: frozenset[str] | None,
    why_not: Callable[[], str] = why_no_docker,
) -> Fault:
    return Fault(name, does, scope, inject, causes, why_not, of="container")


_HELD = f"until it is given up and {HOLD_S:g} s more"

CONTAINER_FAULTS: tuple[Fault, ...] = (
    _fault("container-kill", "docker kill, and docker start", "one", _kill, GONE),
    # The kernel first looks for memory to take back, which may hold up the process for longer than a heartbeat.
    _fault("oom", "it wants more memory than its limit", "one", _out_of_memory, GONE | SILENT),
    _fault("container-pause", f"docker pause {_HELD}, and docker unpause", "one", _pause, SILENT),
    _fault("unplug", f"off its networks {_HELD}, and back under other addresses", "one", _unplug, CUT),
    _fault(
        "narrow",
        f"its network carries {NARROW_BITS_PER_S / 1e6:g} Mbit/s each way, {NARROW_S:g} s long",
        "one",
        _narrow,
        None,
        network.why_not_narrow,
    ),
    _fault("restart-workers", "docker compose restart of all of them", "all", _restart_workers, frozenset({"left"})),
    _fault(
        "scale", f"docker compose up --scale: {MORE_WORKERS} workers more, and less again", "nobody", _scale, UNHURT
    ),
    _fault("leader-kill", f"docker kill, and docker start {HOLD_S:g} s later", "leader", _kill_leader, UNHURT),
    _fault("leader-restart", "docker compose restart", "leader", _restart_leader, UNHURT),
)
"""What can be done to a Compose project only."""

FAULTS_OF_CONTAINERS: tuple[Fault, ...] = (*CONTAINER_FAULTS, *CATALOGUE)
"""Everything that can be done to one."""
