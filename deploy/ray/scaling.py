"""The actor that starts and stops workers of a service on Ray as the load changes (`--autoscale`).

It decides like the local launcher. Ray starts it again when it or its node is lost; the workers stay as they are until then.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import get_placement_group

from multiworld_serving.common.config import UserError, configure_logging
from multiworld_serving.deploy.processes.launcher import Launched, Resources
from multiworld_serving.deploy.ray.actor import ProcessSpec, ProcessState
from multiworld_serving.deploy.ray.actors import GROUP, WORKER_STOP_S, create, kill, running_actors
from multiworld_serving.deploy.ray.cluster import free_resources, nodes
from multiworld_serving.deploy.ray.placement import covers, text, without
from multiworld_serving.deploy.scaling.autoscaler import Autoscaler
from multiworld_serving.deploy.scaling.policy import Limits, ScalingPolicy
from multiworld_serving.server.capacity_report import CapacityReport

logger = logging.getLogger(__name__)

_NAME = "autoscaler"
_ANSWER_S = 2.0
"""Longest wait for what an actor knows. A leader that does not answer counts as one whose load is not known."""
_STOP_MARGIN_S = 10.0


@dataclass(frozen=True)
class ScalingPlan:
    """What the autoscaler knows of its service.

    Attributes:
        template: a worker; all are alike except for their names.
        need: of each worker.
        bundles: the bundle of the placement group that is reserved for each of the first workers, by name.
    """

    limits: Limits
    template: ProcessSpec
    need: Resources
    bundles: Mapping[str, int]
    log_level: str
    log_format: str


def start_autoscaler(plan: ScalingPlan) -> None:
    """Create the actor. It needs no CPU of its own."""
    ray.remote(AutoscalerActor).options(name=_NAME, lifetime="detached", max_restarts=-1, num_cpus=0).remote(plan)


def running_autoscaler() -> dict[str, ActorHandle]:
    """The actor by name; empty if there is none in this namespace."""
    try:
        return {_NAME: ray.get_actor(_NAME)}
    except ValueError:
        return {}


class AutoscalerActor:
    """Scales the workers until it is killed. If that fails, the actor ends, and Ray starts it again."""

    def __init__(self, plan: ScalingPlan) -> None:
        configure_logging(plan.log_level, plan.log_format, process=_NAME)  # type: ignore[arg-type]
        self._plan = plan
        threading.Thread(target=self._run, name=_NAME, daemon=True).start()

    def __repr__(self) -> str:
        return _NAME  # Ray puts it before every line of the log

    def _run(self) -> None:
        try:
            asyncio.run(self._scale())
        except BaseException:
            logger.exception("the autoscaler has failed: this actor ends")
            os._exit(1)

    async def _scale(self) -> None:
        workers = RayWorkers(self._plan)
        await asyncio.to_thread(workers.remove_stopped)
        async with Autoscaler(workers, workers.reports, ScalingPolicy(self._plan.limits)):
            await asyncio.Event().wait()


class RayWorkers:
    """The workers of a service as `Launcher`, and the reports of its leaders."""

    def __init__(self, plan: ScalingPlan) -> None:
        self._plan = plan

    async def reports(self) -> Sequence[CapacityReport | None]:
        """See `Autoscaler`."""

        def ask() -> list[CapacityReport | None]:
            asked = [actor.capacity.remote() for name, actor in running_actors().items() if name.startswith("leader-")]
            answered, _ = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
            found = [_answer(each) if each in answered else None for each in asked]
            return [report if isinstance(report, CapacityReport) else None for report in found]

        return await asyncio.to_thread(ask)

    async def processes(self) -> tuple[Launched, ...]:
        """See `Launcher`. Only workers, without their process ids."""
        return tuple(Launched("worker", name, "", None, 0) for name in await asyncio.to_thread(_workers))

    async def scale_workers(self, count: int) -> None:
        """See `Launcher`."""
        await asyncio.to_thread(self._scale_workers, count)

    def _scale_workers(self, count: int) -> None:
        plan, running = self._plan, _workers()
        names = (f"worker-{index}" for index in range(count + len(running)))
        missing = [name for name in names if name not in running][: max(0, count - len(running))]
        free = free_resources(nodes())
        for name in missing:
            spec = replace(plan.template, name=name)
            if name in plan.bundles:  # the place of a worker that was stopped is still reserved
                create(spec, plan.need, get_placement_group(GROUP), plan.bundles[name])
                continue
            node = next((node for node in free if covers(node, plan.need)), None)
            if node is None:
                raise UserError(f"no node of the Ray cluster has {text(plan.need)} free")
            free[free.index(node)] = without(node, plan.need)
            create(spec, plan.need)

    async def stop_worker(self, name: str) -> None:
        """See `Launcher`."""
        actor = (await asyncio.to_thread(_workers))[name]
        await asyncio.to_thread(_stop, name, actor)

    def remove_stopped(self) -> None:
        """End the actors of workers that a former autoscaler was stopping when it ended."""
        for name, actor in _workers().items():
            state = _answer(actor.state.remote())
            if isinstance(state, ProcessState) and state.stopping:
                _stop(name, actor)


def _workers() -> dict[str, ActorHandle]:
    return {name: actor for name, actor in running_actors().items() if name.startswith("worker-")}


def _stop(name: str, actor: ActorHandle) -> None:
    stopped = actor.stop.remote()
    ray.wait([stopped], timeout=WORKER_STOP_S + _STOP_MARGIN_S)
    kill({name: actor})


def _answer(reference: "ray.ObjectRef[object]") -> object:
    """What an actor answers; None if it does not."""
    try:
        answer: object = ray.get(reference, timeout=_ANSWER_S)
    except ray.exceptions.RayError:
        return None
    return answer
