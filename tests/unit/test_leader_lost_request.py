"""The one thing that must not happen is counted: a request with neither answer nor error."""

import logging
import time

import pytest
import torch
from pydantic import SecretStr

from models import load_model
from server.errors import RequestRefused
from server.leader import Leader
from server.metrics import Metrics
from server.plan import make_plan
from server.scheduling.actions import Action, Refuse
from server.settings import ServeSettings


class ForgetfulLeader(Leader):
    """Has a bug: it tells nobody that a request was refused."""

    def _perform(self, action: Action) -> None:
        if not isinstance(action, Refuse):
            super()._perform(action)


@pytest.mark.parametrize(("leader_class", "lost"), [(Leader, 0), (ForgetfulLeader, 1)])
async def test_request_is_counted_as_lost_when_nobody_answers_it(
    leader_class: type[Leader], lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    model = load_model("resnet18", "random:0", image_size=32)
    settings = ServeSettings(token=SecretStr("a-secret-of-this-test"), join_port=0)
    leader = leader_class(model, make_plan(model, 1), settings, metrics)
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    with pytest.raises(RequestRefused), caplog.at_level(logging.CRITICAL):
        await leader.predict(image, deadline_s=time.monotonic() + 0.05, request_id="r1")
    assert metrics.registry.get_sample_value("multiworld_requests_lost_total") == lost
