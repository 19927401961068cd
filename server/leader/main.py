"""The entry point of a leader: loads and partitions the model, admits workers and frontends, and shuts down in order."""

import asyncio
import contextlib
import gc
import logging
import os
import signal

import torch
import uvloop

from multiworld_serving.common.config.errors import SettingsError, UserError
from multiworld_serving.common.config.process import (
    check_memory,
    notify,
    notify_systemd,
    on_stop_signal,
    raise_descriptor_limit,
    release_free_memory,
)
from multiworld_serving.common.http.metrics_port import metrics_port
from multiworld_serving.common.metrics import merge_metrics
from multiworld_serving.common.observers import suppress_errors
from multiworld_serving.common.service.capacity_report import CAPACITY_FIELD
from multiworld_serving.common.service.model_files import bundle_path, pipeline_source, with_description
from multiworld_serving.common.service.predictor import ServedModel
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.models.optimize.tuning import Tuning
from multiworld_serving.models.stages.pipeline import describe
from multiworld_serving.server.leader.leader import Leader
from multiworld_serving.server.leader.metrics import LeaderMetrics
from multiworld_serving.server.leader.versions.model_source import ModelSource
from multiworld_serving.server.leader.versions.version_table import VersionPlan

logger = logging.getLogger(__name__)

_CAPACITY_INTERVAL_S = 0.5
_COPIES_WHILE_LOADING = 2
"""Held by a worker while it loads: as in `workers.stage_loader`."""


def run(settings: LeaderSettings) -> int:
    """Serve until SIGTERM or Ctrl-C, then finish the requests in flight. Returns the exit status.

    Raises:
        UserError, models.ModelError: a port is in use, the weights are missing, there are more stages than blocks, …
    """
    raise_descriptor_limit()
    with contextlib.ExitStack() as stack:
        if (pipeline := pipeline_source(settings)) is not None and settings.pipeline is None:
            settings = with_description(settings, describe(pipeline))
        model, loader, plan = _prepare(settings)
        stack.callback(gc.unfreeze)
        release_free_memory()
        gc.freeze()  # the garbage collector need not scan torch's modules again
        # As in a frontend.
        with torch.inference_mode(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(settings, model, loader, plan))


def _prepare(settings: LeaderSettings) -> tuple[ServedModel, ModelSource, VersionPlan]:
    """Load the model and split it into stages. Afterwards the weights are in files and not in memory."""
    weights = "" if bundle_path(settings) or settings.pipeline else f" with weights {settings.weights}"
    logger.info("loading %s%s", settings.model_source, weights)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0))))
    source = ModelSource(settings)
    try:
        model, plan = source.open(Tuning(settings.precision, settings.optimize, settings.edge_dtype))
        if settings.local_memory:
            _check_memory(settings, plan)
        return model, source, plan
    finally:
        torch.set_num_threads(1)  # from now on only the workers compute


def _check_memory(settings: LeaderSettings, plan: VersionPlan) -> None:
    """Raise UserError if the workers, which all load at the same time, need more memory than this machine has left."""
    copies = max(settings.replicas_by_stage) + settings.spares
    try:
        check_memory(_COPIES_WHILE_LOADING * copies * sum(stage.weights.size for stage in plan.stages))
    except MemoryError as error:
        workers = f"{settings.stages} stages x {max(settings.replicas_by_stage)} replicas + {settings.spares} spares"
        raise UserError(f"{settings.model_source} does not fit into the memory: {workers} {error}") from error


async def _serve(settings: LeaderSettings, model: ServedModel, loader: ModelSource, plan: VersionPlan) -> int:
    stop = asyncio.Event()
    on_stop_signal(stop.set)
    metrics = LeaderMetrics()
    leader = Leader(model, plan, settings, metrics, loader=loader)
    leader.manager.set_accepted_secrets(*settings.accepted_secrets)
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(leader)
        except OSError as error:
            raise UserError(
                f"{error.strerror or error}; choose another --join-port or --join-host, or stop the program that uses it"
            ) from error
        capacity = asyncio.create_task(_report_capacity(leader, tell=settings.report_capacity))
        stack.callback(capacity.cancel)
        _reload_tokens_on_sighup(settings, leader)
        if settings.metrics_port is not None:
            host = settings.metrics_host or "127.0.0.1"

            async def scrape() -> bytes:
                return merge_metrics([("", model.name, (await metrics.scrape()).decode())]).encode()

            await stack.enter_async_context(
                metrics_port(host, settings.metrics_port, scrape, lambda: leader.available, required=True)
            )
        logger.info(
            "leader %s listens join=%s:%d and waits until each of its %d stages has a worker",
            *(settings.name, settings.join_host, leader.join_port, settings.stages),
        )
        await stack.enter_async_context(notify_systemd())
        await stop.wait()
        await leader.drain(settings.drain_timeout_s)
    logger.info("stopped")
    return 0


async def _report_capacity(leader: Leader, *, tell: bool) -> None:
    """Compute regularly how many replicas the load needs. `tell` the supervisor, which starts and stops workers."""
    observe = suppress_errors(leader.report_capacity)
    while True:
        report = observe()
        if tell and report is not None:
            notify(CAPACITY_FIELD + report.to_json())
        await asyncio.sleep(_CAPACITY_INTERVAL_S)


def _reload_tokens_on_sighup(settings: LeaderSettings, leader: Leader) -> None:
    """Accept the tokens of the file from now on, at SIGHUP. Without a file, SIGHUP keeps its default action."""

    def reload() -> None:
        try:
            secrets = settings.accepted_secrets
        except SettingsError as error:
            logger.error("the join tokens are unchanged: %s", error)  # noqa: TRY400
            return
        leader.manager.set_accepted_secrets(*secrets)
        of_file = len(secrets) - (settings.local_token is not None)
        logger.info("reloaded the join tokens tokens=%d", of_file)

    if settings.token_file is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
