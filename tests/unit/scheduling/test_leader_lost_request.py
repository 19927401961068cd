"""A request with neither answer nor error, which must never happen, is counted."""

import asyncio
import logging
import time

import pytest
import torch

from multiworld_serving.server.errors import RequestRejected
from multiworld_serving.server.observability.leader_metrics import LeaderMetrics
from multiworld_serving.server.pipeline.driver import SchedulerDriver
from multiworld_serving.server.scheduling.actions import Action, Reject
from multiworld_serving.server.scheduling.config import SchedulerConfig
from multiworld_serving.server.versions.version_table import VersionTable
from tests.cut_bundles import plan_without_stages
from tests.unit.scheduling.pending import begin


class ForgetfulDriver(SchedulerDriver):
    """Has a bug: it does not report rejected requests."""

    def _perform(self, action: Action) -> None:
        if not isinstance(action, Reject):
            super()._perform(action)


@pytest.mark.parametrize(("driver_class", "lost"), [(SchedulerDriver, 0), (ForgetfulDriver, 1)])
async def test_request_without_an_outcome_is_counted_as_lost(
    driver_class: type[SchedulerDriver], lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = LeaderMetrics()
    versions = VersionTable(plan_without_stages())
    driver = driver_class("resnet18", SchedulerConfig(1), metrics, versions, lambda: None)
    image = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    asked = begin(driver, image, 1, deadline_s=time.monotonic() - 1, request_id="r1")
    await asyncio.sleep(0)
    with caplog.at_level(logging.CRITICAL):
        driver.requests.report_lost()
    with pytest.raises(RequestRejected):
        await asked
    assert metrics.registry.get_sample_value("multiworld_requests_lost_total") == lost
