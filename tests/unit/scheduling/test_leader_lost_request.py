"""A request with neither answer nor error, which must never happen, is counted."""

import logging
import time

import pytest
import torch
from pydantic import SecretStr

from multiworld_serving.server.errors import RequestRejected
from multiworld_serving.server.observability.leader_metrics import LeaderMetrics
from multiworld_serving.server.pipeline.driver import SchedulerDriver
from multiworld_serving.server.pipeline.driver_context import DriverContext
from multiworld_serving.server.scheduling.actions import Action, Reject
from multiworld_serving.server.settings import ServeSettings
from tests.cut_bundles import plan_without_stages


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
    settings = ServeSettings(token=SecretStr("a-secret-of-this-test"), join_port=0)
    alone = DriverContext("resnet18", lambda _: plan_without_stages(), lambda _: None, lambda _: None, lambda: None)
    driver = driver_class(settings, 1, metrics, alone)
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    with pytest.raises(RequestRejected), caplog.at_level(logging.CRITICAL):
        await driver.begin([image], deadline_s=time.monotonic() + 0.05, request_id="r1")
    assert metrics.registry.get_sample_value("multiworld_requests_lost_total") == lost
