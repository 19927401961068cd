"""The serving process: load and cut the model, start leader, HTTP and metrics, and take it all down again in order."""

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

from config import UserError, raise_descriptor_limit
from config.sources import option
from metrics import build_labels
from models import LoadedModel, Tuning, load_model
from server.access import Gate
from server.accounts import LocalAccounts
from server.admin_routes import AdminRoutes
from server.batch_traces import BatchTraces
from server.connections import Connections
from server.credentials import Credentials, Renewal, read_credentials, warn_of_openness
from server.cut_plan import measured_cut
from server.events_feed import EventsFeed
from server.frontend import create_app, create_operations_app
from server.frontends.desk import FrontDesk
from server.http_server import HttpServer, affordable, bind, serving
from server.join_tokens import JoinTokens
from server.leader import Leader
from server.limits import connection_limits, frontend_limits
from server.metrics import Metrics
from server.plan import make_plan
from server.predictor import PipelineSnapshot, ServedModel
from server.processes import LocalWorkers, Processes
from server.repository_routes import RepositoryRoutes
from server.request_traces import RequestTraces
from server.settings import ServeSettings
from server.v2.statistics import Statistics
from server.versions import VersionPlan
from server.weights_source import WeightsSource
from tracing import Tracing, start_tracing
from tracing.provider import closing

logger = logging.getLogger(__name__)


def run(settings: ServeSettings, processes: Processes) -> int:
    """Serve until SIGTERM or Ctrl-C, then answer what is there and stop. Gives the exit status.

    Args:
        processes: those that it starts.
    Raises:
        UserError, models.ModelError: a port is busy, the weights are missing, there are more stages than blocks, …
    """
    raise_descriptor_limit()
    with contextlib.ExitStack() as stack:
        credentials = read_credentials(settings)
        hosts = {"http_port": settings.host, "metrics_port": settings.operators_host}
        sockets = {
            name: stack.enter_context(bind(host, getattr(settings, name), option(name))) for name, host in hosts.items()
        }
        tracing = _tracing(settings)
        stack.enter_context(closing(tracing))
        model, plan = _prepare(settings)
        stack.callback(gc.unfreeze)
        gc.freeze()  # what is here now stays: the collector need not walk over all of torch again and again
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(settings, credentials, model, plan, tracing, sockets, processes))


def _prepare(settings: ServeSettings) -> tuple[LoadedModel, VersionPlan]:
    logger.info("loading %s with weights %s", settings.model, settings.weights)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0))))
    model = load_model(settings.model, settings.weights, labels=settings.labels, image_size=settings.image_size)
    logger.info("cutting %s@%s into %d stages", model.name, model.version, settings.stages)
    tuning = Tuning(settings.precision, settings.optimize, settings.tuning_limit_s)
    specs = None
    if settings.cut == "measured":
        found = measured_cut(model, settings.stages, batch_size=min(settings.max_batch_size, 8), repeats=3)
        logger.info("measured: the slowest stage takes %.1f ms an image", 1e3 * max(found.stage_s))
        specs = found.specs
    plan = VersionPlan.of(make_plan(model, settings.stages, tuning, specs=specs))
    torch.set_num_threads(1)  # from here on this process moves data; computing is the workers' part
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
    progress = _Progress(settings, sockets)
    warn_of_openness(settings, credentials)
    feed = EventsFeed(metrics)
    watchers: list[Callable[[PipelineSnapshot], None]] = [progress.show, feed.observe]

    def changed(snapshot: PipelineSnapshot) -> None:
        for watcher in watchers:
            watcher(snapshot)

    source = WeightsSource.beside(model, settings)
    traces = BatchTraces(tracing) if tracing else None
    leader = Leader(model.name, plan, settings, metrics, source=source, traces=traces, on_change=changed)
    tokens = JoinTokens(settings, leader.let_in)
    gate = Gate(credentials.rings, tokens.operators())
    admin = AdminRoutes(leader.restart_workers)
    repository = RepositoryRoutes(leader.snapshot, leader.load_version, leader.unload)
    statistics = Statistics()
    requests = RequestTraces(tracing) if tracing else None
    app = create_app(leader, _served(model), frontend_limits(settings), metrics, feed, gate, requests, statistics)
    try:
        await leader.__aenter__()
    except OSError as error:
        raise UserError(f"{error}; choose another --join-port or --join-host, or stop what listens there") from error
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_exit(leader)
        limits, contexts = affordable(connection_limits(settings)), credentials.contexts
        operators = HttpServer(
            create_operations_app(metrics, admin, gate, repository),
            sockets["metrics_port"],
            Connections(limits, metrics.connection_closed),
            context=contexts["metrics_port"],
        )
        servers = {"metrics_port": await stack.enter_async_context(serving(operators))}
        desk: FrontDesk | None = None
        ends = [stop]
        if settings.frontends == 1:
            connections = Connections(limits, metrics.connection_closed, metrics.connections)
            http = HttpServer(
                app,
                sockets["http_port"],
                connections,
                context=contexts["http_port"],
                access_log=settings.access_log,
            )
            servers["http_port"] = await stack.enter_async_context(serving(http))
        else:
            desk = _desk(settings, _served(model), leader, app, statistics, metrics, sockets, processes)
            watchers.append(lambda _: desk.state_changed())
            ends.append((await stack.enter_async_context(desk)).ended)
        Renewal(settings, gate, tokens, servers, desk).on_hangup()
        progress.listening(leader.join_port)
        if processes.workers is not None:
            workers = processes.workers(
                settings,
                f"{_reachable(settings.join_host)}:{leader.join_port}",
                on_restart=lambda slot: metrics.worker_restarted(str(slot)),
            )
            progress.workers = await stack.enter_async_context(workers)
        await asyncio.wait(
            {asyncio.ensure_future(end.wait()) for end in (*ends, *(server.stopped for server in servers.values()))},
            return_when=asyncio.FIRST_COMPLETED,
        )
        await leader.drain(settings.drain_timeout_s)
    logger.info("stopped")
    return 0


def _desk(
    settings: ServeSettings,
    model: ServedModel,
    leader: Leader,
    app: FastAPI,
    statistics: Statistics,
    metrics: Metrics,
    sockets: dict[str, socket.socket],
    processes: Processes,
) -> FrontDesk:
    """For several frontends."""
    metrics.frontend_slots(settings.frontends)
    start = partial(processes.frontends, settings, on_restart=lambda slot: metrics.frontend_restarted(str(slot)))
    accounts = LocalAccounts(model.name, metrics, statistics)
    return FrontDesk(settings, model, leader, app, accounts, metrics, sockets["http_port"], start)


def _tracing(settings: ServeSettings) -> Tracing | None:
    instance = f"{socket.gethostname()}-{os.getpid()}"
    return start_tracing(
        settings.otlp_endpoint, service="multiworld-leader", instance=instance, ratio=settings.trace_ratio
    )


def _stop_signal() -> asyncio.Event:
    """Set by the first SIGTERM or Ctrl-C; a second one ends the process at once."""
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


def _reachable(host: str) -> str:
    """Where this machine's own workers reach what listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - translated, not bound
    return f"[{reachable}]" if ":" in reachable else reachable


def _outside(host: str) -> str:
    """What other machines call one that listens on `host`."""
    name = socket.gethostname() if host in {"0.0.0.0", "::"} else host  # noqa: S104 - translated, not bound
    return f"[{name}]" if ":" in name else name


def _served(model: LoadedModel) -> ServedModel:
    sizes = model.preprocessing
    return ServedModel(model.name, model.version, model.labels, sizes.resize_size, sizes.crop_size)


class _Progress:
    """Follows the replicas: tells how the start goes, at its end where to send a request, and the supervisor who has proven itself."""

    def __init__(self, settings: ServeSettings, sockets: dict[str, socket.socket]) -> None:
        self.workers: LocalWorkers | None = None
        self._settings = settings
        scheme = "http" if settings.tls_cert_file is None else "https"
        self._http = f"{scheme}://{_reachable(settings.host)}:{sockets['http_port'].getsockname()[1]}"
        operators = f"{_reachable(settings.operators_host)}:{sockets['metrics_port'].getsockname()[1]}"
        self._metrics = f"{scheme}://{operators}/metrics"
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
                self._settings.advertised(join_port) or f"{_outside(self._settings.join_host)}:{join_port}",
            )

    def show(self, snapshot: PipelineSnapshot) -> None:
        """A replica changed its state."""
        if self.workers is not None:
            replicas = [*snapshot.spares, *(replica for stage in snapshot.stages for replica in stage.replicas)]
            for replica in replicas:
                if replica.state == "ready" and replica.worker is not None:
                    self.workers.proven(replica.worker)
            self.workers.present({r.worker for r in replicas if r.worker is not None and r.state != "broken"})
        if self._ready:
            return
        stages = "  ".join(f"stage {stage.index}: {_count(stage.replicas)}" for stage in snapshot.stages)
        if stages != self._last:
            self._last = stages
            logger.info("workers: %s", stages)
        if snapshot.ready:
            self._ready = True
            logger.info("ready after %.1f s, to be seen at %s; try:", time.monotonic() - self._started_s, self._http)
            key = " -H 'Authorization: Bearer KEY'" if self._settings.needs_keys else ""
            print(f"\n    curl -s{key} -F image=@photo.jpg {self._http}/predict\n", flush=True)  # noqa: T201


def _count(replicas: tuple[Any, ...]) -> str:
    states = [replica.state for replica in replicas]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
