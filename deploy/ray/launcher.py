"""`multiworld serve --launcher ray` and `multiworld down`: start a service as actors of a Ray cluster, and take it down.

The actors are detached: they run on when this process has ended, until `down`. Whatever fails while the service starts, everything that was
started is taken down again.
"""

import contextlib
import logging
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import ray
from pydantic import SecretStr
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from multiworld_serving.common.config.addresses import parse_address
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.tokens import new_token
from multiworld_serving.common.settings.serve import ServeSettings
from multiworld_serving.deploy.health import health_error
from multiworld_serving.deploy.ray.actor import ProcessActor, ProcessSpec, ProcessState
from multiworld_serving.deploy.ray.placement import ActorPlacement, NodeResources, place, total
from multiworld_serving.server.supervisor.model_settings import by_name, described
from multiworld_serving.server.supervisor.programs import (
    Role,
    frontend_values,
    leader_values,
    model_values,
    timeouts_s,
    worker_values,
)

logger = logging.getLogger(__name__)

_GROUP = "multiworld"
"""Name of the placement group, in the namespace of the service."""
_ROLES: tuple[Role, ...] = ("frontend", "leader", "worker")
"""In the order in which they stop: frontends answer their requests first."""
_PROBE_S = 5.0
"""Longest wait for a connection to the head."""
_ADVICE = "start one with `ray start --head`, run this command on one of its nodes, or set RAY_ADDRESS to HOST:PORT of its head"
_GONE_S = 15.0
"""Longest wait until Ray has forgotten actors that were killed."""
_RESERVE_S = 30.0
"""Longest wait until Ray has reserved resources that were free before."""
_START_S = 600.0
"""Longest time from the first actor to a pipeline that is ready."""
_ANSWER_S = 10.0
"""Longest wait for what an actor knows."""
_POLL_S = 0.25
_WORKER_STOP_S = 35.0
"""From SIGTERM to SIGKILL of a worker: until its leaders have rerouted its batches."""


def serve(settings: ServeSettings) -> int:
    """Start the service, wait until it is ready, and leave it running. Returns the exit status.

    Raises:
        UserError: no cluster answers, its resources do not suffice, a service runs in this namespace, or a process cannot be started.
            Nothing is left running.
    """
    settings = _checked(settings)
    models = {name: described(each) for name, each in by_name(settings.groups).items()}
    with _connected(settings.ray_namespace):
        if _running_actors():
            raise UserError(
                f"a service runs already in the namespace {settings.ray_namespace} of this Ray cluster; stop it with `multiworld down`, "
                f"or choose another --ray-namespace"
            )
        nodes = _free_resources()
        specs = _specs(settings, models)
        groups = [{name: specs[name].need for name in names} for _, names in groupby(specs, _kind)]
        spread = max(settings.frontends, *(max(each.replicas, each.leaders) for each in models.values()))
        placement = place(groups, nodes, spread)
        logger.info("starting processes=%d nodes=%d strict=%s", len(specs), len(nodes), placement.strict)
        try:
            _start(specs, placement)
            states = _until_ready(settings, specs)
        except BaseException:
            logger.info("taking everything down")
            _kill(_running_actors())
            _remove_group()
            raise
        _log_addresses(settings, states)
    return 0


def down(namespace: str, timeout_s: float) -> None:
    """Stop the service in this namespace: frontends, which answer their requests, then leaders, then workers.

    Args:
        timeout_s: for the processes of each role to stop; what still runs then is killed.
    Raises:
        UserError: no cluster answers, or no service runs there.
    """
    with _connected(namespace):
        actors = _running_actors()
        if not actors and not _remove_group():
            raise UserError(f"no service runs in the namespace {namespace} of this Ray cluster; see --ray-namespace")
        for role in _ROLES:
            of_role = {name: actor for name, actor in actors.items() if _role(name) == role}
            stops = [actor.stop.remote() for actor in of_role.values()]
            if stops:
                ray.wait(stops, num_returns=len(stops), timeout=timeout_s)
            logger.info("stopped %ss=%d", role, len(of_role))
        _kill(actors)
        _remove_group()


def _checked(settings: ServeSettings) -> ServeSettings:
    """The settings with a new secret of the processes. Raises UserError for settings that make no sense on a cluster."""
    for each in settings.groups:
        if each.device.startswith("cuda:"):
            raise UserError(f"--device {each.device}: Ray chooses the GPU of each worker; use --device cuda")
        if "@" in each.model_name:
            raise UserError(
                f"{each.model_name}: the launcher ray serves one version of a model; name it without @VERSION"
            )
        if each.external_workers:
            raise UserError(
                "--external-workers: the launcher ray starts the workers; further ones may join with --token-file"
            )
        if each.autoscale is not None:
            raise UserError(
                "--autoscale: the launcher ray starts a fixed number of workers; further ones may join with --token-file"
            )
    secrets = settings.secrets  # raises if the token file is invalid
    settings = settings.model_copy(update={"local_token": new_token()})
    if settings.token_file is not None:  # nodes need no copy of the file
        settings = settings.model_copy(update={"token": SecretStr(secrets[0].decode()), "token_file": None})
    return settings


def _kind(name: str) -> str:
    """The name of a process without its number."""
    return name.rpartition("-")[0]


def _role(name: str) -> str:
    return _kind(name).rpartition("-")[2]


def _specs(settings: ServeSettings, models: Mapping[str, ServeSettings]) -> dict[str, ProcessSpec]:
    """The processes of the service by name."""
    prefixes = {model: f"{model}-" if len(models) > 1 else "" for model in models}
    leaders = {
        model: tuple(f"{prefixes[model]}leader-{index}" for index in range(each.leaders))
        for model, each in models.items()
    }
    specs: dict[str, ProcessSpec] = {}

    def add(role: Role, name: str, need: NodeResources, values: dict[str, object], **more: Any) -> None:
        timeouts = timeouts_s(settings, role, _WORKER_STOP_S)
        options = {"namespace": settings.ray_namespace, "timeouts_s": timeouts, **more}
        specs[name] = ProcessSpec(role, name, need, values, **options)

    for model, each in models.items():
        for index, name in enumerate(leaders[model]):
            sockets = {"join_fd": (each.join_host, each.join_port_of(index))}
            add("leader", name, NodeResources(1), leader_values(each, index), sockets=sockets)
        threads, gpus = each.threads or 1, int(each.device == "cuda")
        values = {**worker_values(each), "device": "cuda:0" if gpus else "cpu", "threads": threads}
        for index in range(each.num_workers):
            name = f"{prefixes[model]}worker-{index}"
            add("worker", name, NodeResources(threads, gpus), values, leaders={model: leaders[model]})
    for index in range(settings.frontends):
        sockets = {
            "http_fd": (settings.host, settings.http_port),
            "admin_fd": (settings.admin_address, settings.admin_port),
        }
        if settings.grpc_port is not None:
            sockets["grpc_fd"] = (settings.host, settings.grpc_port)
        more = {"leaders": leaders, "models": model_values(models), "sockets": sockets}
        add("frontend", f"frontend-{index}", NodeResources(1), frontend_values(settings, index), **more)
    return specs


def _start(specs: Mapping[str, ProcessSpec], placement: ActorPlacement) -> None:
    """Reserve the resources and create the actors. Raises UserError if Ray does not reserve them."""
    shares = [total([specs[name].need for name in bundle]) for bundle in placement.bundles]
    bundles = [{"CPU": share.cores, **({"GPU": share.gpus} if share.gpus else {})} for share in shares]
    strategy = "STRICT_SPREAD" if placement.strict else "SPREAD"
    group = placement_group(bundles, strategy=strategy, name=_GROUP, lifetime="detached")
    if not group.wait(_RESERVE_S):
        raise UserError(
            f"Ray has not reserved the resources within {_RESERVE_S:g} s: another program took them; try again"
        )
    for index, bundle in enumerate(placement.bundles):
        for name in bundle:
            _create(specs[name], group, index)


def _until_ready(settings: ServeSettings, specs: Mapping[str, ProcessSpec]) -> dict[str, ProcessState]:
    """Wait until all processes run and a frontend is ready. Returns their states. Raises UserError."""
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        actors = _running_actors()
        if ended := ", ".join(sorted(specs.keys() - actors.keys())):
            raise UserError(f"{ended}: cannot be started on its node; the log above says why")
        states: dict[str, ProcessState] = _answers(
            {name: each.state.remote() for name, each in actors.items()}, _ANSWER_S
        )
        if invalid := ", ".join(f"{name} on {state.host}" for name, state in states.items() if state.cannot_start):
            raise UserError(f"{invalid}: cannot start; see its error above")
        if late := ", ".join(sorted(name for name in specs if name not in states or not states[name].started)):
            late = f", not started: {late}"
        elif settings.tls_cert_file is not None or any(
            not health_error(f"http://{state.addresses['http_fd']}/v2/health/ready")
            for state in states.values()
            if "http_fd" in state.addresses
        ):
            return states
        time.sleep(_POLL_S)
    raise UserError(f"the service is not ready after {_START_S:g} s{late}; the log above says why")


def _log_addresses(settings: ServeSettings, states: Mapping[str, ProcessState]) -> None:
    scheme = "http" if settings.tls_cert_file is None else "https"

    def listed(name: str, prefix: str = "") -> str:
        found: Iterable[str] = (state.addresses[name] for state in states.values() if name in state.addresses)
        return ",".join(f"{prefix}{address}" for address in found)

    http, metrics = listed("http_fd", f"{scheme}://"), listed("admin_fd", f"{scheme}://")
    grpc = "" if settings.grpc_port is None else f" grpc={listed('grpc_fd')}"
    logger.info("listening http=%s metrics=%s join=%s%s", http, metrics, listed("join_fd"), grpc)
    hosts = {state.host for state in states.values()}
    logger.info("ready on %d nodes: %s; stop it with `multiworld down`", len(hosts), ", ".join(sorted(hosts)))


# -- the cluster ---------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _connected(namespace: str) -> Iterator[None]:
    """Be connected to the cluster of RAY_ADDRESS, else that of this machine, while the block runs. Raises UserError if there is none.

    Args:
        namespace: in which actors are created and found.
    """
    _probe()
    # Ray warns that actors of a removed placement group cannot run again; ours are stopped before it is removed.
    logging.getLogger("ray.actor").setLevel(logging.ERROR)
    try:
        ray.init(address="auto", namespace=namespace, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"cannot connect to the Ray cluster: {str(error).splitlines()[0]}; {_ADVICE}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _probe() -> None:
    """Raise UserError unless something listens at the head's address. `ray.init` would wait for it without a limit."""
    try:
        head = parse_address(ray._private.services.canonicalize_bootstrap_address("auto") or "")
    except ConnectionError as error:
        raise UserError(f"there is no Ray cluster on this machine; {_ADVICE}") from error
    except ValueError as error:
        raise UserError("RAY_ADDRESS must be HOST:PORT of the head of a Ray cluster") from error
    try:
        socket.create_connection(head, timeout=_PROBE_S).close()
    except OSError as error:
        raise UserError(f"nothing answers at {head}: {error}; {_ADVICE}") from error


def _free_resources() -> list[NodeResources]:
    """What each node that is alive has free."""
    found: Mapping[str, Mapping[str, float]] = ray._private.state.available_resources_per_node()
    free = [found.get(node["NodeID"], {}) for node in ray.nodes() if node["Alive"]]
    return [NodeResources(each.get("CPU", 0.0), int(each.get("GPU", 0))) for each in free]


def _answers(asked: Mapping[str, "ray.ObjectRef[Any]"], timeout_s: float) -> dict[str, Any]:
    """Return the results of actors or tasks that complete within this time. Failed and late calls are left out."""
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
    found = {}
    for name, answer in asked.items():
        with contextlib.suppress(ray.exceptions.RayError):  # a GetTimeoutError is a RayError
            found[name] = ray.get(answer, timeout=0)
    return found


def _create(spec: ProcessSpec, group: PlacementGroup, bundle: int) -> None:
    """Create the actor of a process in a bundle of the placement group."""
    ray.remote(ProcessActor).options(
        name=spec.name,
        lifetime="detached",
        max_restarts=-1,
        max_task_retries=0,
        num_cpus=spec.need.cores,
        num_gpus=spec.need.gpus,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
    ).remote(spec)


def _running_actors() -> dict[str, ActorHandle]:
    """The actors of the service in this namespace, by name."""
    found = {}
    for name in ray.util.list_named_actors():
        if _role(name) in _ROLES:
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                found[name] = ray.get_actor(name)
    return found


def _kill(actors: Mapping[str, ActorHandle]) -> None:
    """End actors, and their processes with them, and wait until Ray has forgotten their names."""
    for actor in actors.values():
        ray.kill(actor, no_restart=True)
    deadline_s = time.monotonic() + _GONE_S
    while actors.keys() & set(ray.util.list_named_actors()) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


def _remove_group() -> bool:
    """Remove the placement group. Returns whether there was one."""
    try:
        remove_placement_group(get_placement_group(_GROUP))
    except ValueError:
        return False
    return True
