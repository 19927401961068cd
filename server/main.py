"""The entry point of the service: loads and partitions the model, runs leader, HTTP and metrics, and shuts down in order."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import uvloop
from fastapi import FastAPI

from multiworld_serving.common.config import UserError, raise_descriptor_limit
from multiworld_serving.common.config.process import notify_systemd
from multiworld_serving.common.config.sources import option
from multiworld_serving.common.http.connection_table import ConnectionTable
from multiworld_serving.common.http.server import HttpServer, bind, serving, within_descriptor_limit
from multiworld_serving.common.metrics import build_labels, guarded
from multiworld_serving.common.tracing import Tracing, close_on_exit, start_tracing
from multiworld_serving.models import LoadedModel, Tuning, load_model
from multiworld_serving.server.api.admin import AdminRoutes
from multiworld_serving.server.api.app import create_admin_app, create_app
from multiworld_serving.server.api.repository import RepositoryRoutes
from multiworld_serving.server.auth.authorizer import Authorizer
from multiworld_serving.server.auth.credential_reloader import (
    CredentialReloader,
    Credentials,
    read_credentials,
    warn_if_unprotected,
)
from multiworld_serving.server.auth.join_tokens import JoinTokens
from multiworld_serving.server.frontends.manager import FrontendManager
from multiworld_serving.server.http.limits import connection_limits, request_limits
from multiworld_serving.server.leader import Leader
from multiworld_serving.server.observability.event_feed import EventFeed
from multiworld_serving.server.observability.inference_statistics import Statistics
from multiworld_serving.server.observability.metrics import Metrics
from multiworld_serving.server.observability.request_recorder import LocalRequestRecorder
from multiworld_serving.server.observability.request_traces import RequestTraces
from multiworld_serving.server.pipeline.batch_traces import BatchTraces
from multiworld_serving.server.predictor import PipelineSnapshot, ServedModel
from multiworld_serving.server.processes import LocalWorkers, Processes
from multiworld_serving.server.settings import ServeSettings
from multiworld_serving.server.versions.partition_plan import measure_partition
from multiworld_serving.server.versions.stage_plan import make_plan
from multiworld_serving.server.versions.version_table import VersionPlan
from multiworld_serving.server.versions.weights_source import WeightsSource

logger = logging.getLogger(__name__)


def run(settings: ServeSettings, processes: Processes) -> int:
    """Serve until SIGTERM or Ctrl-C, then finish the requests in flight. Returns the exit status.

    Args:
        processes: starts local workers and frontends.
    Raises:
        UserError, models.ModelError: a port is in use, the weights are missing, there are more stages than blocks, …
    """
    raise_descriptor_limit()
    with contextlib.ExitStack() as stack:
        credentials = read_credentials(settings)
        hosts = {"http_port": settings.host, "metrics_port": settings.admin_host}
        sockets = {
            name: stack.enter_context(bind(host, getattr(settings, name), option(name))) for name, host in hosts.items()
        }
        tracing = _tracing(settings)
        stack.enter_context(close_on_exit(tracing))
        model, plan = _prepare(settings)
        stack.callback(gc.unfreeze)
        gc.freeze()  # the garbage collector need not scan torch's modules again
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(settings, credentials, model, plan, tracing, sockets, processes))


def _prepare(settings: ServeSettings) -> tuple[LoadedModel, VersionPlan]:
    logger.info("loading %s with weights %s", settings.model, settings.weights)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0))))
    model = load_model(settings.model, settings.weights, labels=settings.labels, image_size=settings.image_size)
    logger.info("partitioning %s@%s into %d stages", model.name, model.version, settings.stages)
    tuning = Tuning(settings.precision, settings.optimize, settings.tuning_limit_s)
    specs = None
    if settings.cut == "measured":
        found = measure_partition(model, settings.stages, batch_size=min(settings.max_batch_size, 8), repeats=3)
        logger.info("measured: the slowest stage takes %.1f ms per image", 1e3 * max(found.stage_s))
        specs = found.specs
    plan = VersionPlan.of(make_plan(model, settings.stages, tuning, specs=specs))
    torch.set_num_threads(1)  # from now on only the workers compute
    return model, plan


async def _serve(
    settings: ServeSettings,
    credentials: Credentials,
    model: LoadedModel,
    plan: VersionPlan,
    tracing: Tracing | None,
    sockets: dict[str, socket.socket],
    processes: Processes,
) -> int:
    stop = _stop_signal()
    metrics = Metrics(build_labels(torch.__version__))
    reporter = _StartupReporter(settings, sockets)
    warn_if_unprotected(settings, credentials)
    feed = EventFeed(metrics)
    listeners = _SnapshotListeners(reporter.tell_supervisor, feed.observe, reporter.show)
    source = WeightsSource.beside(model, settings)
    traces = BatchTraces(tracing) if tracing else None
    leader = Leader(model.name, plan, settings, metrics, source=source, traces=traces, on_change=listeners.tell)
    tokens = JoinTokens(settings, leader.set_accepted_secrets)
    authorizer = Authorizer(credentials.keys, tokens.admin_tokens())
    admin = AdminRoutes(leader.restart_workers)
    repository = RepositoryRoutes(leader.snapshot, leader.load_version, leader.unload)
    statistics = Statistics()
    requests = RequestTraces(tracing) if tracing else None
    app = create_app(
        leader, _served_model(model), request_limits(settings), metrics, feed, authorizer, requests, statistics
    )
    try:
        await leader.__aenter__()
    except OSError as error:
        raise UserError(
            f"{error}; choose another --join-port or --join-host, or stop the program that uses it"
        ) from error
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_exit(leader)
        limits, contexts = within_descriptor_limit(connection_limits(settings)), credentials.contexts
        admin_server = HttpServer(
            create_admin_app(metrics, admin, authorizer, repository),
            sockets["metrics_port"],
            ConnectionTable(limits, metrics.connection_closed),
            context=contexts["metrics_port"],
        )
        servers = {"metrics_port": await stack.enter_async_context(serving(admin_server))}
        manager: FrontendManager | None = None
        ends = [stop]
        if settings.frontends == 1:
            connections = ConnectionTable(limits, metrics.connection_closed, metrics.connections)
            http = HttpServer(
                app,
                sockets["http_port"],
                connections,
                context=contexts["http_port"],
                access_log=settings.access_log,
            )
            servers["http_port"] = await stack.enter_async_context(serving(http))
        else:
            manager = _frontend_manager(
                settings, _served_model(model), leader, app, statistics, metrics, sockets, processes
            )
            listeners.add(lambda _: manager.state_changed())
            ends.append((await stack.enter_async_context(manager)).ended)
        CredentialReloader(settings, authorizer, tokens, servers, manager).reload_on_sighup()
        reporter.listening(leader.join_port)
        await stack.enter_async_context(notify_systemd())
        if processes.workers is not None:
            workers = processes.workers(
                settings,
                f"{_local_host(settings.join_host)}:{leader.join_port}",
                on_restart=guarded(lambda slot: metrics.worker_restarted(str(slot))),
            )
            reporter.workers = await stack.enter_async_context(workers)
        await asyncio.wait(
            {asyncio.ensure_future(end.wait()) for end in (*ends, *(server.stopped for server in servers.values()))},
            return_when=asyncio.FIRST_COMPLETED,
        )
        await leader.drain(settings.drain_timeout_s)
    logger.info("stopped")
    return 0


def _frontend_manager(
    settings: ServeSettings,
    model: ServedModel,
    leader: Leader,
    app: FastAPI,
    statistics: Statistics,
    metrics: Metrics,
    sockets: dict[str, socket.socket],
    processes: Processes,
) -> FrontendManager:
    """The manager of several frontends."""
    metrics.frontend_slots(settings.frontends)
    start = partial(
        processes.frontends, settings, on_restart=guarded(lambda slot: metrics.frontend_restarted(str(slot)))
    )
    recorder = LocalRequestRecorder(model.name, metrics, statistics)
    return FrontendManager(settings, model, leader, app, recorder, metrics, sockets["http_port"], start)


def _tracing(settings: ServeSettings) -> Tracing | None:
    instance = f"{socket.gethostname()}-{os.getpid()}"
    return start_tracing(
        settings.otlp_endpoint, service="multiworld-leader", instance=instance, ratio=settings.trace_ratio
    )


def _stop_signal() -> asyncio.Event:
    """An event that the first SIGTERM or Ctrl-C sets; the second one ends the process immediately."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask(signum: signal.Signals) -> None:
        if stop.is_set():
            loop.remove_signal_handler(signum)
            signal.raise_signal(signum)
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, ask, signum)
    return stop


def _local_host(host: str) -> str:
    """The address at which this machine's own workers reach a listener on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - translated, not bound
    return f"[{reachable}]" if ":" in reachable else reachable


def _external_host(host: str) -> str:
    """The name by which other machines reach a listener on `host`."""
    name = socket.gethostname() if host in {"0.0.0.0", "::"} else host  # noqa: S104 - translated, not bound
    return f"[{name}]" if ":" in name else name


def _served_model(model: LoadedModel) -> ServedModel:
    sizes = model.preprocessing
    return ServedModel(model.name, model.version, model.labels, sizes.resize_size, sizes.crop_size)


class _SnapshotListeners:
    """Callbacks for each change of a replica's state or of the version. A failing callback does not affect the others."""

    def __init__(self, *listeners: Callable[[PipelineSnapshot], None]) -> None:
        self._listeners = [guarded(listener) for listener in listeners]

    def add(self, listener: Callable[[PipelineSnapshot], None]) -> None:
        self._listeners.append(guarded(listener))

    def tell(self, snapshot: PipelineSnapshot) -> None:
        for listener in self._listeners:
            listener(snapshot)


class _StartupReporter:
    """Logs the progress of the start and how to send a request; tells the supervisor which workers serve."""

    def __init__(self, settings: ServeSettings, sockets: dict[str, socket.socket]) -> None:
        self.workers: LocalWorkers | None = None
        self._settings = settings
        scheme = "http" if settings.tls_cert_file is None else "https"
        self._http = f"{scheme}://{_local_host(settings.host)}:{sockets['http_port'].getsockname()[1]}"
        admin = f"{_local_host(settings.admin_host)}:{sockets['metrics_port'].getsockname()[1]}"
        self._metrics = f"{scheme}://{admin}/metrics"
        self._started_s = time.monotonic()
        self._last = ""
        self._ready = False

    def listening(self, join_port: int) -> None:
        logger.info(
            "listening http=%s metrics=%s join=%s:%d", self._http, self._metrics, self._settings.join_host, join_port
        )
        if self._settings.external_workers:
            logger.info(
                "waiting for workers; on each of their machines: multiworld worker --leader %s --token-file …",
                self._settings.advertised(join_port) or f"{_external_host(self._settings.join_host)}:{join_port}",
            )

    def tell_supervisor(self, snapshot: PipelineSnapshot) -> None:
        """Tell the supervisor which workers serve and which are connected."""
        if self.workers is None:
            return
        replicas = [*snapshot.spares, *(replica for stage in snapshot.stages for replica in stage.replicas)]
        for replica in replicas:
            if replica.state == "ready" and replica.worker is not None:
                self.workers.proven(replica.worker)
        self.workers.present({r.worker for r in replicas if r.worker is not None and r.state != "broken"})

    def show(self, snapshot: PipelineSnapshot) -> None:
        """Log the replica states until the pipeline is ready."""
        if self._ready:
            return
        stages = "  ".join(f"stage {stage.index}: {_count(stage.replicas)}" for stage in snapshot.stages)
        if stages != self._last:
            self._last = stages
            logger.info("workers: %s", stages)
        if snapshot.ready:
            self._ready = True
            logger.info("ready after %.1f s, status page at %s; try:", time.monotonic() - self._started_s, self._http)
            key = " -H 'Authorization: Bearer KEY'" if self._settings.needs_keys else ""
            print(f"\n    curl -s{key} -F image=@photo.jpg {self._http}/predict\n", flush=True)  # noqa: T201


def _count(replicas: tuple[Any, ...]) -> str:
    states = [replica.state for replica in replicas]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
