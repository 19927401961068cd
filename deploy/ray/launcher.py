"""`multiworld serve --launcher ray` and `multiworld down`: start a service as actors of a Ray cluster, and take it down.

The actors are detached: they run on when this process has ended, until `down`. Whatever fails while the service starts, everything that was
started is taken down again.
"""

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

import ray
from pydantic import SecretStr
from ray.actor import ActorHandle
from ray.util.placement_group import placement_group

from multiworld_serving.common.config import UserError
from multiworld_serving.common.config.tokens import new_token
from multiworld_serving.deploy.health import health_error
from multiworld_serving.deploy.processes.launcher import Resources, Role
from multiworld_serving.deploy.processes.programs import (
    blocked_timeout_s,
    frontend_values,
    leader_values,
    stop_timeout_s,
    worker_blocked_timeout_s,
    worker_values,
)
from multiworld_serving.deploy.ray.actor import ProcessSpec, ProcessState
from multiworld_serving.deploy.ray.actors import (
    GROUP,
    ROLES,
    WORKER_STOP_S,
    create,
    kill,
    ray_resources,
    remove_group,
    running_actors,
)
from multiworld_serving.deploy.ray.cluster import check_versions, connected, free_resources, nodes
from multiworld_serving.deploy.ray.placement import Placement, place, total
from multiworld_serving.deploy.ray.scaling import ScalingPlan, running_autoscaler, start_autoscaler
from multiworld_serving.deploy.scaling.autoscaler import limits_of
from multiworld_serving.deploy.scaling.policy import Limits
from multiworld_serving.server.settings import ServeSettings

logger = logging.getLogger(__name__)

_RESERVE_S = 30.0
"""Longest wait until Ray has reserved resources that were free before."""
_START_S = 600.0
"""Longest time from the first actor to a pipeline that is ready."""
_ANSWER_S = 10.0
"""Longest wait for what an actor knows."""
_POLL_S = 0.25


def serve(settings: ServeSettings) -> int:
    """Start the service, wait until it is ready, and leave it running. Returns the exit status.

    Raises:
        UserError: no cluster answers, its resources do not suffice, its nodes have other versions, a service runs in this namespace, or a
            process refuses its settings. Nothing is left running.
    """
    settings = _checked(settings)
    with connected(settings.ray_address, settings.ray_namespace):
        if running_actors():
            raise UserError(
                f"a service runs already in the namespace {settings.ray_namespace} of this Ray cluster; stop it with `multiworld down`, "
                f"or choose another --ray-namespace"
            )
        found = nodes()
        check_versions(found)
        specs, needs = _specs(settings)
        groups = [{name: needs[name] for name in specs if specs[name].role == role} for role in ROLES]
        spread = max(settings.replicas, settings.leaders, settings.frontends)
        placement = place(groups, free_resources(found), spread)
        logger.info("starting processes=%d nodes=%d strict=%s", len(specs), len(found), placement.strict)
        try:
            _start(specs, needs, placement)
            states = _until_ready(settings, specs)
            if (limits := limits_of(settings)) is not None:
                start_autoscaler(_scaling_plan(settings, limits, specs, needs, placement))
        except BaseException:
            logger.info("taking everything down")
            kill({**running_autoscaler(), **running_actors()})
            remove_group()
            raise
        _log_addresses(settings, states)
    return 0


def down(address: str, namespace: str, timeout_s: float) -> None:
    """Stop the service in this namespace: frontends, which answer their requests, then leaders, then workers.

    Args:
        timeout_s: for the processes of each role to stop; what still runs then is killed.
    Raises:
        UserError: no cluster answers, or no service runs there.
    """
    with connected(address, namespace):
        kill(running_autoscaler())  # first, because it would start workers again
        actors = running_actors()
        if not actors and not remove_group():
            raise UserError(f"no service runs in the namespace {namespace} of this Ray cluster; see --ray-namespace")
        for role in ROLES:
            of_role = {name: actor for name, actor in actors.items() if name.startswith(f"{role}-")}
            stops = [actor.stop.remote() for actor in of_role.values()]
            if stops:
                ray.wait(stops, num_returns=len(stops), timeout=timeout_s)
            logger.info("stopped %ss=%d", role, len(of_role))
        kill(actors)
        remove_group()


def _checked(settings: ServeSettings) -> ServeSettings:
    """The settings with a new secret of the processes. Raises UserError for settings that make no sense on a cluster."""
    if settings.device.startswith("cuda:"):
        raise UserError(f"--device {settings.device}: Ray chooses the GPU of each worker; use --device cuda")
    if settings.external_workers:
        raise UserError(
            "--external-workers: the launcher ray starts the workers; further ones may join with --token-file"
        )
    secrets = settings.secrets  # raises if the token file is invalid
    settings = settings.model_copy(update={"local_token": new_token()})
    if settings.token_file is not None:  # nodes need no copy of the file
        settings = settings.model_copy(update={"token": SecretStr(secrets[0].decode()), "token_file": None})
    return settings


def _specs(settings: ServeSettings) -> tuple[dict[str, ProcessSpec], dict[str, Resources]]:
    """The processes of the service by name, and what each needs."""
    leaders = tuple(f"leader-{index}" for index in range(settings.leaders))
    specs: dict[str, ProcessSpec] = {}
    needs: dict[str, Resources] = {}

    def add(role: Role, name: str, need: Resources, values: dict[str, object], **more: Any) -> None:
        needs[name] = need
        timeouts = {"stop_timeout_s": stop_timeout_s(settings), "blocked_timeout_s": blocked_timeout_s(settings)}
        shared = {"sockets": {}, "leaders": leaders, "namespace": settings.ray_namespace, "threads": 1, **timeouts}
        specs[name] = ProcessSpec(role, name, values, **{**shared, **more})

    for index, name in enumerate(leaders):
        sockets = {"join_fd": (settings.join_host, settings.join_port_of(index))}
        add("leader", name, Resources(1), leader_values(settings, index), sockets=sockets, leaders=())
    for index in range(settings.frontends):
        sockets = {
            "http_fd": (settings.host, settings.http_port),
            "metrics_fd": (settings.admin_host, settings.metrics_port),
            **({} if settings.grpc_port is None else {"grpc_fd": (settings.host, settings.grpc_port)}),
        }
        add("frontend", f"frontend-{index}", Resources(1), frontend_values(settings, index), sockets=sockets)
    threads = settings.threads or 1
    gpus = int(settings.device == "cuda")
    for index in range(settings.num_workers):
        values = {**worker_values(settings), "device": "cuda:0" if gpus else "cpu", "threads": threads}
        add(
            *("worker", f"worker-{index}", Resources(threads, gpus, settings.worker_memory), values),
            threads=threads,
            stop_timeout_s=WORKER_STOP_S,
            blocked_timeout_s=worker_blocked_timeout_s(settings),
        )
    return specs, needs


def _start(specs: Mapping[str, ProcessSpec], needs: Mapping[str, Resources], placement: Placement) -> None:
    """Reserve the resources and create the actors. Raises UserError if Ray does not reserve them."""
    bundles = [ray_resources(total([needs[name] for name in bundle])) for bundle in placement.bundles]
    strategy = "STRICT_SPREAD" if placement.strict else "SPREAD"
    group = placement_group(bundles, strategy=strategy, name=GROUP, lifetime="detached")
    if not group.wait(_RESERVE_S):
        raise UserError(
            f"Ray has not reserved the resources within {_RESERVE_S:g} s: another program took them; try again"
        )
    for index, bundle in enumerate(placement.bundles):
        for name in bundle:
            create(specs[name], needs[name], group, index)


def _scaling_plan(
    settings: ServeSettings,
    limits: Limits,
    specs: Mapping[str, ProcessSpec],
    needs: Mapping[str, Resources],
    placement: Placement,
) -> ScalingPlan:
    workers = {name for name, spec in specs.items() if spec.role == "worker"}
    bundles = {name: index for index, names in enumerate(placement.bundles) for name in names if name in workers}
    template = min(workers)
    return ScalingPlan(limits, specs[template], needs[template], bundles, settings.log_level, settings.log_format)


def _until_ready(settings: ServeSettings, specs: Mapping[str, ProcessSpec]) -> dict[str, ProcessState]:
    """Wait until all processes run and a frontend is ready. Returns their states. Raises UserError."""
    deadline_s = time.monotonic() + _START_S
    while True:
        actors = running_actors()
        if ended := ", ".join(sorted(specs.keys() - actors.keys())):
            raise UserError(f"{ended}: cannot be started on its node; the log above says why")
        states = _states(actors)
        if invalid := [f"{name} on {state.host}" for name, state in states.items() if state.invalid_input]:
            raise UserError(f"{', '.join(invalid)}: the process refuses its settings; its line above says why")
        if states.keys() == specs.keys() and all(state.started for state in states.values()):
            urls = [
                f"http://{state.addresses['http_fd']}/readyz"
                for state in states.values()
                if "http_fd" in state.addresses
            ]
            if settings.tls_cert_file is not None or any(not health_error(url) for url in urls):
                return states
        if time.monotonic() > deadline_s:
            late = ", ".join(sorted(specs.keys() - {name for name, state in states.items() if state.started}))
            raise UserError(
                f"the service is not ready after {_START_S:g} s, not started: {late or 'none'}; the log above says why"
            )
        time.sleep(_POLL_S)


def _states(actors: Mapping[str, ActorHandle]) -> dict[str, ProcessState]:
    """The processes of the actors that answer now."""
    asked = {name: actor.state.remote() for name, actor in actors.items()}
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWER_S)
    states: dict[str, ProcessState] = {}
    for name, answer in asked.items():
        with contextlib.suppress(ray.exceptions.RayError):  # a GetTimeoutError is a RayError
            states[name] = ray.get(answer, timeout=0)
    return states


def _log_addresses(settings: ServeSettings, states: Mapping[str, ProcessState]) -> None:
    scheme = "http" if settings.tls_cert_file is None else "https"

    def listed(name: str, prefix: str = "") -> str:
        found: Iterable[str] = (state.addresses[name] for state in states.values() if name in state.addresses)
        return ",".join(f"{prefix}{address}" for address in found)

    http, metrics = listed("http_fd", f"{scheme}://"), listed("metrics_fd", f"{scheme}://")
    grpc = "" if settings.grpc_port is None else f" grpc={listed('grpc_fd')}"
    logger.info("listening http=%s metrics=%s join=%s%s", http, metrics, listed("join_fd"), grpc)
    hosts = {state.host for state in states.values()}
    logger.info("ready on %d nodes: %s; stop it with `multiworld down`", len(hosts), ", ".join(sorted(hosts)))
