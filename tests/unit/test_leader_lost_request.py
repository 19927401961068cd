"""The one thing that must not happen is counted: a request with neither answer nor error."""

import logging
import time

import pytest
import torch
from pydantic import SecretStr

from server.errors import RequestRefused
from server.metrics import Metrics
from server.scheduling.actions import Action, Refuse
from server.settings import ServeSettings
from server.shell import Shell, Surroundings


class ForgetfulShell(Shell):
    """Has a bug: it tells nobody that a request was refused."""

    def _perform(self, action: Action) -> None:
        if not isinstance(action, Refuse):
            super()._perform(action)


@pytest.mark.parametrize(("shell_class", "lost"), [(Shell, 0), (ForgetfulShell, 1)])
async def test_request_is_counted_as_lost_when_nobody_answers_it(
    shell_class: type[Shell], lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    settings = ServeSettings(token=SecretStr("a-secret-of-this-test"), join_port=0)
    alone = Surroundings("resnet18", lambda _: 1, lambda _: None, lambda _: None, lambda: None)
    shell = shell_class(settings, 1, metrics, alone)
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    with pytest.raises(RequestRefused), caplog.at_level(logging.CRITICAL):
        await shell.predict(image, deadline_s=time.monotonic() + 0.05, request_id="r1")
    assert metrics.registry.get_sample_value("multiworld_requests_lost_total") == lost
