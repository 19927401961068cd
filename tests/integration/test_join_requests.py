"""A leader refuses invalid join requests and gives the reason; and the address that it announces."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator

import pytest
from pydantic import SecretStr

from multiworld import AskError, WorldManager, ask
from multiworld_serving.common.config.addresses import Address
from multiworld_serving.common.service.predictor import ImageSizes, ModelVersion
from multiworld_serving.common.settings.serve import ServeSettings
from multiworld_serving.common.wire.join import PROTOCOL, RELEASE, JoinOffer
from multiworld_serving.server.leader.leader import Leader
from multiworld_serving.server.leader.metrics import LeaderMetrics
from multiworld_serving.server.leader.versions.version_table import VersionPlan
from tests.resnets import resnet_plan
from tests.unit.server.image_model import image_classifier

SECRET = "a-secret-of-this-test"
GOOD = {
    **{"worker": "w", "device": "cpu", "host": "node-1", "pid": 12, "held": ["a" * 64], "serves": False},
    **{"edge": "10.0.0.5:4000/0123abcd", "protocol": PROTOCOL, "release": RELEASE},
}
BAD = {
    "a surrogate in the name": ({**GOOD, "worker": "\ud800"}, "JoinRequest: "),
    "an empty name": ({**GOOD, "worker": ""}, "worker"),
    "a very long name": ({**GOOD, "worker": "w" * 40_000}, "worker"),
    "a process that cannot be": ({**GOOD, "pid": -1}, "pid"),
    "an edge without an incarnation": ({**GOOD, "edge": "10.0.0.5:4000"}, "edge"),
    "digests that are none": ({**GOOD, "held": ["0", "1"]}, "held"),
    "a number for a name": ({**GOOD, "worker": 1}, "JoinRequest: Expected `str`, got `int` - at `\\$.worker`"),
    "a field too many": ({**GOOD, "more": 1}, "unknown field `more`; do both sides run the same release"),
    "a field too few": ({"worker": "w", "protocol": PROTOCOL}, "missing required field `device`; do both"),
    "an earlier protocol": (
        {**GOOD, "protocol": PROTOCOL - 1, "release": "0.0.1"},
        f"worker 'w' has release 0.0.1 with protocol {PROTOCOL - 1}, .* upgrade this worker",
    ),
    "a later protocol": ({**GOOD, "protocol": PROTOCOL + 1}, "upgrade this leader"),
    "deep nesting": ("[" * 30_000, "JoinRequest: "),
}


@pytest.fixture(scope="module")
def plan() -> VersionPlan:
    return VersionPlan(ModelVersion(1, "random:0"), resnet_plan("random:0", 1, image_size=32))


@pytest.fixture
async def leader(plan: VersionPlan) -> AsyncIterator[Leader]:
    settings = ServeSettings(token=SecretStr(SECRET), join_port=0, stages=1, advertise_host="leader.example")
    model = image_classifier("resnet18", "random:0", ("a", "b"), ImageSizes(32, 32))
    async with Leader(model, plan, settings, LeaderMetrics()) as made:
        yield made


@pytest.mark.parametrize("why", BAD)
async def test_invalid_join_request_is_refused_with_a_reason(
    leader: Leader, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    request, reason = BAD[why]
    question = request if isinstance(request, str) else json.dumps(request)
    with caplog.at_level(logging.WARNING), pytest.raises(AskError, match=reason):
        await ask("127.0.0.1", leader.join_port, question, secret=SECRET.encode())
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.exc_info is None
    assert len(record.getMessage()) < 400
    assert record.getMessage().isprintable()
    json.dumps([stage.replicas[0].worker for stage in leader.snapshot().stages]).encode()
    assert {replica.state for stage in leader.snapshot().stages for replica in stage.replicas} == {"absent"}


async def test_offer_has_the_advertised_address(leader: Leader) -> None:
    offer = JoinOffer.from_json(await ask("127.0.0.1", leader.join_port, json.dumps(GOOD), secret=SECRET.encode()))
    assert offer.address == f"leader.example:{leader.join_port}"


async def test_worker_joins_at_the_address_of_the_offer() -> None:
    async with WorldManager() as leader, WorldManager() as worker:
        address, nowhere = Address("127.0.0.1", leader.listen()), Address("127.0.0.1", 9)
        offer = JoinOffer("w", 1, address=str(address))
        await asyncio.gather(offer.form(leader, 0, address, 60.0), offer.join(worker, nowhere, 60.0))
