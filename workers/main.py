"""The worker process: one device, one engine, and one leader at a time."""

import asyncio
import contextlib
import gc
import logging
import os
import signal

import torch
import uvloop

from multiworld import WorldManager
from multiworld_serving.common.config.addresses import local_host
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.process import keep_free_memory, notify_systemd, raise_descriptor_limit
from multiworld_serving.common.edges.edges import Edges
from multiworld_serving.common.edges.metrics import EdgeMetrics
from multiworld_serving.common.http.metrics_port import metrics_port
from multiworld_serving.common.settings.worker import WorkerSettings
from multiworld_serving.models.stages.pipeline import PipelineSource
from multiworld_serving.workers import exit_timer
from multiworld_serving.workers.compute.engine import Engine
from multiworld_serving.workers.compute.pinned_memory import PinnedMemory
from multiworld_serving.workers.devices import device_of
from multiworld_serving.workers.leader_connection import LeaderConnection, StuckError
from multiworld_serving.workers.observability.gpu import GpuCollector
from multiworld_serving.workers.observability.metrics import WorkerMetrics

logger = logging.getLogger(__name__)

_LAST_FETCHES_S = 1.0
"""How long a worker that stops waits for frontends to fetch the last answers."""


def run(settings: WorkerSettings) -> int:
    """Serve until stopped. Returns the exit status: 0 after SIGTERM, SIGINT, or a leader's restart request;
    70 (EXIT_STUCK) when the model hangs; 71 (EXIT_DEVICE_FAILED) when the GPU has failed. The kernel ends a process that is out of memory,
    see `exit_timer`.

    Raises:
        UserError: the device or the address to bind does not exist, or the leader rejects the token.
    """
    raise_descriptor_limit()
    keep_free_memory()
    device = device_of(settings.device, settings.slot)
    settings = settings.model_copy(update={"device": str(device)})
    torch.set_num_threads(settings.threads or len(os.sched_getaffinity(0)))
    with contextlib.suppress(RuntimeError):  # torch allows it once per process
        torch.set_num_interop_threads(1)
    gc.freeze()  # the garbage collector need not scan torch's modules again
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, device))


async def _serve(settings: WorkerSettings, device: torch.device) -> int:
    stop, engine = asyncio.Event(), Engine(device, allowed=_allowed(settings))
    metrics = WorkerMetrics()
    loop = asyncio.get_running_loop()
    exit_timer.handle_loop_errors(loop)
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    status = 0
    try:
        async with contextlib.AsyncExitStack() as stack:
            edges = await _open_edges(stack, settings, device, metrics)
            manager = await stack.enter_async_context(
                WorldManager(
                    secret=settings.secret,
                    verify_collectives=False,  # must equal the leader's
                    bind_host=settings.bind_host or "",
                    **settings.heartbeats,
                )
            )
            connection = LeaderConnection(settings, engine, edges, manager, metrics, stop)
            await _start_metrics_port(stack, settings, metrics, engine, connection)
            await stack.enter_async_context(notify_systemd(lambda: connection.serving))
            await connection.run()
    except StuckError as ending:
        logger.error("%s: exiting", ending)  # noqa: TRY400
        status = ending.status
    finally:
        engine.close()
    logger.info("stopped")
    return status


def _allowed(settings: WorkerSettings) -> dict[str, PipelineSource]:
    """The pipelines of --allow by name. Raises UserError."""
    found: dict[str, PipelineSource] = {}
    for text in filter(None, map(str.strip, (settings.allow or "").split(","))):
        source = PipelineSource.parse(text)
        if source is None or found.setdefault(source.name, source) != source:
            raise UserError(f"--allow {text}: expected FILE.py:LIST or MODULE:LIST, and each name once")
    return found


async def _open_edges(
    stack: contextlib.AsyncExitStack, settings: WorkerSettings, device: torch.device, metrics: WorkerMetrics
) -> Edges:
    host = settings.bind_host or local_host(settings.leaders)
    register = PinnedMemory(device).register if device.type == "cuda" else None
    edges = Edges(settings.name, host, settings, EdgeMetrics(metrics), settings.bind_host or "", register)
    await stack.enter_async_context(edges)
    stack.push_async_callback(edges.wait_fetched, _LAST_FETCHES_S)
    return edges


async def _start_metrics_port(
    stack: contextlib.AsyncExitStack,
    settings: WorkerSettings,
    metrics: WorkerMetrics,
    engine: Engine,
    connection: LeaderConnection,
) -> None:
    """Serve metrics and health probes until the stack closes, if `metrics_port` is set."""
    if settings.metrics_port is None:
        return
    metrics.watch(lambda: engine.busy, lambda: len(engine.stages))
    if engine.device.type == "cuda":
        metrics.registry.register(stack.enter_context(GpuCollector(engine.device).running()))

    port = metrics_port(settings.metrics_host, settings.metrics_port, metrics.scrape, lambda: connection.serving)
    await stack.enter_async_context(port)
