"""The worker process: one device, one engine, and a membership with each of its leaders."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence

import torch
import uvloop

from config import UserError, raise_descriptor_limit
from metrics import build_labels
from multiworld import WorldManager
from tracing import Tracing, start_tracing
from tracing.provider import closing
from workers import last_resort
from workers.compiler import Compiler
from workers.cores import SharedCores
from workers.device import check_device
from workers.engine import Engine
from workers.gpu import GpuWatch, nvml_reader
from workers.membership import Membership, StuckError
from workers.metrics import WorkerMetrics
from workers.metrics_port import metrics_port
from workers.settings import WorkerSettings
from workers.traces import ComputeTraces

logger = logging.getLogger(__name__)

EXIT_STUCK = 70


def run(settings: WorkerSettings) -> int:
    """Serve until told to stop. Gives the exit status: 0 after SIGTERM, Ctrl-C, a leader's request to restart or the parent's
    end; 70 when the model hangs or memory is lacking.

    Raises:
        UserError: the device or the address to bind is not there, or the token is wrong.
    """
    raise_descriptor_limit()
    device = check_device(settings.device)
    _check_bind_host(settings.bind_host)
    torch.set_num_threads(settings.threads or len(os.sched_getaffinity(0)))
    with contextlib.suppress(RuntimeError):  # may be set once a process
        torch.set_num_interop_threads(1)
    tracing = start_tracing(settings.otlp_endpoint, service="multiworld-worker", instance=settings.name)
    with closing(tracing), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, device, tracing))


async def _serve(settings: WorkerSettings, device: torch.device, tracing: Tracing | None) -> int:
    compiler = Compiler() if device.type == "cpu" else None
    stop, engine = asyncio.Event(), Engine(device, _shared_cores(settings), compiler)
    traces = ComputeTraces(tracing, settings.name, settings.device) if tracing else None
    metrics = WorkerMetrics(build_labels(torch.__version__))
    loop = asyncio.get_running_loop()
    last_resort.watch(loop)
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    if settings.exit_with_parent:
        _watch_parent(lambda: loop.call_soon_threadsafe(stop.set))
    stuck, refusals = False, list[UserError]()
    try:
        async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            memberships = list[Membership]()
            await _tell_metrics(stack, settings, metrics, engine, memberships)
            for leader in settings.leaders:
                manager = await stack.enter_async_context(
                    WorldManager(
                        secret=settings.secret,
                        checked=False,  # as the leader's
                        bind_host=settings.bind_host or "",
                        heartbeat_interval_s=settings.heartbeat_interval_s,
                        heartbeat_timeout_s=settings.heartbeat_timeout_s,
                    )
                )
                memberships.append(Membership(leader, settings, engine, manager, stop, metrics, traces))
                tasks.create_task(memberships[-1].keep_serving())
    except* StuckError as errors:
        logger.error("%s: exiting", errors.exceptions[0])  # noqa: TRY400
        stuck = True
    except* UserError as errors:
        refusals += [error for error in errors.exceptions if isinstance(error, UserError)]
    engine.close()
    if refusals:  # bare, for the command line to tell: what is raised within `except*` is a group again
        raise refusals[0]
    logger.info("stopped")
    return EXIT_STUCK if stuck else 0


def _shared_cores(settings: WorkerSettings) -> SharedCores | None:
    if settings.cores_file is None:
        return None
    try:
        total = len(os.sched_getaffinity(0))
        return SharedCores(settings.cores_file, settings.cores_seat, settings.cores_seats, total)
    except OSError as error:
        logger.warning("the cores cannot be shared (%s): computing with %d threads", error, torch.get_num_threads())
        return None


def _check_bind_host(host: str | None) -> None:
    """Raises UserError when this machine does not have that address."""
    if host is None:
        return
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        try:
            sock.bind((host, 0))
        except OSError as error:
            raise UserError(
                f"--bind-host {host} cannot be used: {error.strerror}; it must be an address of this machine, which `ip address` lists"
            ) from error


async def _tell_metrics(
    stack: contextlib.AsyncExitStack,
    settings: WorkerSettings,
    metrics: WorkerMetrics,
    engine: Engine,
    memberships: Sequence[Membership],
) -> None:
    """Answer scrapes and probes until the stack ends, if that is wanted. More memberships may come."""
    if settings.metrics_port is None:
        return
    device, watch = engine.device, None
    if (read := nvml_reader(device)) is not None:
        watch = stack.enter_context(GpuWatch(read))

    def refresh() -> None:
        metrics.busy(engine.busy)
        if watch is not None:
            metrics.gpu(str(device), watch.latest())

    def ready() -> bool:
        return any(membership.serving for membership in memberships)

    await stack.enter_async_context(metrics_port(settings.metrics_host, settings.metrics_port, metrics, refresh, ready))


def _watch_parent(on_end: Callable[[], object]) -> None:
    """Call `on_end` when standard input ends: its other end is held by who started us."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):  # not sys.stdin: its lock held by this thread would abort the interpreter's exit
                pass
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            on_end()

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
