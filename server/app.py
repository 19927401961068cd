"""The serving process: load and cut the model, start leader, HTTP and metrics, and take it all down again in order."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import torch
import uvicorn
import uvloop
from starlette.types import ASGIApp

from config import UserError, raise_descriptor_limit
from metrics import build_labels
from models import LoadedModel, Tuning, load_model
from server.admin_routes import AdminRoutes
from server.events_feed import EventsFeed
from server.frontend import FrontendLimits, create_app, create_operations_app
from server.leader import Leader
from server.metrics import Metrics
from server.plan import StagePlan, make_plan
from server.predictor import PipelineSnapshot, ServedModel
from server.settings import ServeSettings

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_CLOSE_S = 3
"""How long connections may take to end once all requests have their answers."""


class LocalWorkers(Protocol):
    """The processes of the local workers."""

    def proven(self, worker: str) -> None:
        """That worker serves: should it end, it is worth starting again at once."""

    def present(self, names: Collection[str]) -> None:
        """These workers are with the leader, and no others."""


class WorkerStarter(Protocol):
    """Starts the local workers, and stops them when its context ends."""

    def __call__(
        self, settings: ServeSettings, leader: str, *, on_restart: Callable[[int], None]
    ) -> AbstractAsyncContextManager[LocalWorkers]: ...


def run(settings: ServeSettings, start_workers: WorkerStarter | None) -> int:
    """Serve until SIGTERM or Ctrl-C, then answer what is there and stop. Gives the exit status.

    Args:
        start_workers: starts the local workers; None when workers come from elsewhere.
    Raises:
        UserError, models.ModelError: a port is busy, the weights are missing, there are more stages than blocks, …
    """
    raise_descriptor_limit()
    with contextlib.ExitStack() as stack:
        sockets = {name: stack.enter_context(_bind(settings, name)) for name in ("http_port", "metrics_port")}
        model, plan = _prepare(settings)
        stack.callback(gc.unfreeze)
        gc.freeze()  # what is here now stays: the collector need not walk over all of torch again and again
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(settings, model, plan, sockets, start_workers))


def _prepare(settings: ServeSettings) -> tuple[LoadedModel, tuple[StagePlan, ...]]:
    logger.info("loading %s with weights %s", settings.model, settings.weights)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0))))
    model = load_model(settings.model, settings.weights, labels=settings.labels, image_size=settings.image_size)
    logger.info("cutting %s@%s into %d stages", model.name, model.version, settings.stages)
    plan = make_plan(model, settings.stages, Tuning(settings.precision, settings.optimize, settings.tuning_limit_s))
    torch.set_num_threads(1)  # from here on this process moves data; computing is the workers' part
    return model, plan


async def _serve(
    settings: ServeSettings,
    model: LoadedModel,
    plan: tuple[StagePlan, ...],
    sockets: dict[str, socket.socket],
    start_workers: WorkerStarter | None,
) -> int:
    stop = _stop_signal()
    metrics = Metrics(build_labels(torch.__version__))
    progress = _Progress(settings, sockets)
    feed = EventsFeed(metrics)

    def changed(snapshot: PipelineSnapshot) -> None:
        progress.show(snapshot)
        feed.observe(snapshot)

    leader = Leader(model, plan, settings, metrics, on_change=changed)
    app = create_app(leader, _served(model), _limits(settings), metrics, feed)
    try:
        await leader.__aenter__()
    except OSError as error:
        raise UserError(f"{error}; choose another --join-port or --join-host, or stop what listens there") from error
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_exit(leader)
        api = await stack.enter_async_context(_serving(app, sockets["http_port"], access_log=settings.access_log))
        operations = create_operations_app(metrics, AdminRoutes(leader.restart_workers, _admin_token(settings)))
        await stack.enter_async_context(_serving(operations, sockets["metrics_port"], access_log=False))
        progress.listening(leader.join_port)
        if start_workers is not None:
            workers = start_workers(
                settings,
                f"{_reachable(settings.join_host)}:{leader.join_port}",
                on_restart=lambda slot: metrics.worker_restarted(str(slot)),
            )
            progress.workers = await stack.enter_async_context(workers)
        await asyncio.wait(
            {asyncio.ensure_future(stop.wait()), asyncio.ensure_future(api.stopped.wait())},
            return_when=asyncio.FIRST_COMPLETED,
        )
        logger.info("stopping: %d requests to answer first", leader.snapshot().requests_in_flight)
        await leader.drain(settings.drain_timeout_s)
    logger.info("stopped")
    return 0


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


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: this process has one way to stop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopped = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@asynccontextmanager
async def _serving(app: ASGIApp, sock: socket.socket, *, access_log: bool) -> AsyncIterator[_Server]:
    """Serve `app` on a listening socket while the block lasts."""
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="auto",
        log_config=None,
        log_level=logging.WARNING if not access_log else None,
        access_log=access_log,
        server_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=_CLOSE_S,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    task.add_done_callback(lambda _: server.stopped.set())
    try:
        yield server
    finally:
        server.should_exit = True
        await task


def _bind(settings: ServeSettings, setting: str) -> socket.socket:
    port = getattr(settings, setting)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((settings.host, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        option = "--" + setting.replace("_", "-")
        raise UserError(
            f"cannot listen on {settings.host}:{port}: {error.strerror}; stop what listens there, or choose another "
            f"{option} (0 takes any free one) or --host"
        ) from error
    sock.setblocking(False)
    return sock


def _reachable(host: str) -> str:
    """Where this machine's own workers reach what listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - translated, not bound
    return f"[{reachable}]" if ":" in reachable else reachable


def _served(model: LoadedModel) -> ServedModel:
    sizes = model.preprocessing
    return ServedModel(model.name, model.version, model.labels, sizes.resize_size, sizes.crop_size)


def _admin_token(settings: ServeSettings) -> bytes:
    """What an admin verb must know. Nothing where the token was made up by us, for nobody can know it: then it is this machine only."""
    return b"" if settings.token_is_ours else settings.secret


def _limits(settings: ServeSettings) -> FrontendLimits:
    return FrontendLimits(
        timeout_s=settings.timeout_s,
        max_body_bytes=settings.max_body_bytes,
        max_image_pixels=settings.max_image_pixels,
        exact_images=settings.decoding == "exact",
        max_images=min(FrontendLimits.max_images, settings.queue_limit),
        top_k=min(settings.top_k, 1000),
    )


class _Progress:
    """Follows the replicas: tells how the start goes, at its end where to send a request, and the supervisor who has proven itself."""

    def __init__(self, settings: ServeSettings, sockets: dict[str, socket.socket]) -> None:
        self.workers: LocalWorkers | None = None
        self._settings = settings
        self._http = f"http://{_reachable(settings.host)}:{sockets['http_port'].getsockname()[1]}"
        self._metrics = f"http://{_reachable(settings.host)}:{sockets['metrics_port'].getsockname()[1]}/metrics"
        self._started_s = time.monotonic()
        self._last = ""
        self._ready = False

    def listening(self, join_port: int) -> None:
        logger.info(
            "listening http=%s metrics=%s join=%s:%d", self._http, self._metrics, self._settings.join_host, join_port
        )
        if self._settings.external_workers:
            logger.info(
                "waiting for workers; on each of their machines: multiworld worker --leader %s:%d --token-file …",
                *(self._settings.join_host, join_port),
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
            print(f"\n    curl -s -F image=@photo.jpg {self._http}/predict\n", flush=True)  # noqa: T201


def _count(replicas: tuple[Any, ...]) -> str:
    states = [replica.state for replica in replicas]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
