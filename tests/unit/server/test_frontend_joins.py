"""A leader refuses a frontend of another protocol, and says what to upgrade."""

import json
from types import SimpleNamespace
from typing import cast

import pytest
from pydantic import SecretStr

from multiworld import AskError, WorldManager, ask
from multiworld_serving.common.service.predictor import ImageSizes
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.common.wire.join import RELEASE
from multiworld_serving.server.leader.leader import Leader
from multiworld_serving.server.leader.metrics import LeaderMetrics
from multiworld_serving.server.leader.sessions import FrontendSessions
from tests.unit.server.image_model import image_classifier

SECRET = "a-secret-of-this-test"
MODEL = image_classifier("m", "v1", ("a", "b"), ImageSizes(18, 16))


@pytest.mark.parametrize(("protocol", "older"), [(0, "frontend"), (99, "leader")])
async def test_join_request_of_another_protocol_is_refused_with_what_to_upgrade(
    protocol: int, older: str, caplog: pytest.LogCaptureFixture
) -> None:
    question = {"frontend": "frontend-0", "protocol": protocol, "release": "0.0.1", "of another protocol": []}
    settings = LeaderSettings(name="leader-0", local_token=SecretStr(SECRET))
    async with WorldManager(secret=SECRET) as manager:
        port = manager.listen("127.0.0.1", 0)
        leader = cast(Leader, SimpleNamespace(manager=manager, join_port=port))
        manager.answer("127.0.0.1", port, FrontendSessions(settings, MODEL, leader, LeaderMetrics()).answer)
        for _ in range(3):
            with pytest.raises(AskError) as refusal:
                await ask("127.0.0.1", port, json.dumps(question), secret=SECRET.encode())
    text = str(refusal.value)
    ours = f"and this leader release {RELEASE}"
    assert f"frontend 'frontend-0' has release 0.0.1 with protocol {protocol}, {ours}" in text
    assert f"upgrade this {older} (upgrade one leader first, then the frontends, then the other leaders)" in text
    lines = [record.getMessage() for record in caplog.records if "with protocol" in record.getMessage()]
    assert len(lines) == 1, "a process that asks again and again fills no log"
    assert "upgrade this" in lines[0]
