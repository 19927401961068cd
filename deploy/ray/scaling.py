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
from multiworld_serving.deploy.ray.actor import ProcessSpec
from multiworld_serving.deploy.ray.cluster import GROUP, answers, create, free_resources, kill, running_actors
from multiworld_serving.deploy.ray.placement import covers, without
from multiworld_serving.deploy.scaling.autoscaler import Autoscaler
from multiworld_serving.deploy.scaling.policy import Limits, ScalingPolicy
from multiworld_serving.server.capacity_report import CapacityReport

logger = logging.getLogger(__name__)

AUTOSCALER = "autoscaler"
"""Name of the actor."""
_ANSWER_S = 2.0
"""Longest wait for what an actor knows. A leader that does not answer counts as one whose load is not known."""
_STOP_MARGIN_S = 10.0


@dataclass(frozen=True)
class ScalingPlan:
    """What the autoscaler knows of its service.

    Attributes:
        template: a worker; all are alike except for their names.
        bundles: the bundle of the placement group that is reserved for each of the first workers, by name.
    """

    limits: Limits
    template: ProcessSpec
    bundles: Mapping[str, int]


def start_autoscaler(plan: ScalingPlan) -> None:
    """Create the actor. It needs no CPU of its own."""
    options = {"name": AUTOSCALER, "lifetime": "detached", "max_restarts": -1, "num_cpus": 0}
    ray.remote(AutoscalerActor).options(**options).remote(plan)


class AutoscalerActor:
    """Scales the workers until it is killed, as a `Launcher`. If that fails, the actor ends, and Ray starts it again."""

    def __init__(self, plan: ScalingPlan) -> None:
        values = plan.template.values
        configure_logging(values["log_level"], values["log_format"], process=AUTOSCALER)  # type: ignore[arg-type]
        self._plan = plan
        threading.Thread(target=self._run, name=AUTOSCALER, daemon=True).start()

    def __repr__(self) -> str:
        return AUTOSCALER  # Ray puts it before every line of the log

    def _run(self) -> None:
        try:
            asyncio.run(self._scale())
        except BaseException:
            logger.exception("the autoscaler has failed: this actor ends")
            os._exit(1)

    async def _scale(self) -> None:
        workers = running_actors("worker")
        states = answers({name: actor.state.remote() for name, actor in workers.items()}, _ANSWER_S)
        for name in [name for name, state in states.items() if state.stopping]:  # by a former autoscaler
            self._stop_worker(name, workers[name])
        async with Autoscaler(self, ScalingPolicy(self._plan.limits)):
            await asyncio.Event().wait()

    async def capacity_reports(self) -> Sequence[CapacityReport | None]:
        """See `Launcher`."""

        def ask() -> list[CapacityReport | None]:
            asked = {name: actor.capacity.remote() for name, actor in running_actors("leader").items()}
            found = answers(asked, _ANSWER_S)
            return [found.get(name) for name in asked]

        return await asyncio.to_thread(ask)

    async def workers(self) -> set[str]:
        """See `Launcher`."""
        return set(await asyncio.to_thread(running_actors, "worker"))

    async def scale_workers(self, count: int) -> None:
        """See `Launcher`."""
        await asyncio.to_thread(self._scale_workers, count)

    def _scale_workers(self, count: int) -> None:
        plan, running = self._plan, running_actors("worker")
        names = (f"worker-{index}" for index in range(count + len(running)))
        missing = [name for name in names if name not in running][: max(0, count - len(running))]
        free = free_resources()
        for name in missing:
            spec = replace(plan.template, name=name)
            if name in plan.bundles:  # the place of a worker that was stopped is still reserved
                create(spec, get_placement_group(GROUP), plan.bundles[name])
                continue
            node = next((node for node in free if covers(node, spec.need)), None)
            if node is None:
                raise UserError(f"no node of the Ray cluster has {spec.need} free")
            free[free.index(node)] = without(node, spec.need)
            create(spec)

    async def stop_worker(self, name: str) -> None:
        """See `Launcher`."""
        actors = await asyncio.to_thread(running_actors, "worker")
        await asyncio.to_thread(self._stop_worker, name, actors[name])

    def _stop_worker(self, name: str, actor: ActorHandle) -> None:
        ray.wait([actor.stop.remote()], timeout=self._plan.template.stop_timeout_s + _STOP_MARGIN_S)
        kill({name: actor})
