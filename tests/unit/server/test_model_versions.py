"""Several versions of a model: their shares, which of them gets a request, what clients and metrics see, and shadows."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import msgspec
import pytest
import torch

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.keys import KeySet, hash_key, parse_keys
from multiworld_serving.common.service.errors import OverloadedError
from multiworld_serving.common.service.model_versions import Share
from multiworld_serving.common.service.predictor import Prediction, ServedModel
from multiworld_serving.server.frontend.api.app import create_api
from multiworld_serving.server.frontend.api.groups import ModelGroups
from multiworld_serving.server.frontend.api.inference import Inference
from multiworld_serving.server.frontend.api.version_choice import VersionChoice, version_at
from multiworld_serving.server.frontend.auth.authorizer import ApiKeys, Authorizer
from multiworld_serving.server.frontend.http.limits import RequestLimits
from multiworld_serving.server.frontend.observability.metrics import FrontendMetrics
from multiworld_serving.server.supervisor.shares import Shares, divide, initial_shares
from tests.unit.server.frontend_app import MODEL, ColourPredictor, client_of, group_of, image_bytes
from tests.waiting import until

INFER = {"inputs": [{"name": "input", "datatype": "UINT8", "shape": [1, 3, 16, 16], "data": [0] * 768}]}


@pytest.mark.parametrize("shares", [(95.0, 5.0), (50.0, 50.0), (0.0, 100.0), (70.0, 20.0, 10.0)])
def test_shares_are_met_within_a_tenth_of_a_point_over_5000_requests(shares: tuple[float, ...]) -> None:
    choice = VersionChoice(None)
    found = Counter(version_at(choice.place("m", {"headers": []}), shares, [True] * len(shares)) for _ in range(5000))
    for version, share in enumerate(shares):
        assert abs(100 * found[version] / 5000 - share) <= 0.1, found


def test_share_of_an_unusable_version_goes_to_the_others_and_no_other_client_moves() -> None:
    choice, shares = VersionChoice("X-Client"), (50.0, 30.0, 20.0)
    scopes = [{"headers": [(b"x-client", str(client).encode())]} for client in range(5000)]
    places = [choice.place("m", scope) for scope in scopes]
    assert places == [VersionChoice("x-client").place("m", scope) for scope in scopes], "in every frontend"
    before = [version_at(place, shares, [True, True, True]) for place in places]
    after = [version_at(place, shares, [True, False, True]) for place in places]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != 1)
    moved = Counter(new for old, new in zip(before, after, strict=True) if old == 1)
    assert moved[0] / moved.total() == pytest.approx(50 / 70, abs=0.05)
    more = [version_at(place, (40.0, 30.0, 30.0), [True, True, True]) for place in places]
    assert all(new == 2 for old, new in zip(before, more, strict=True) if old == 2), "a larger share keeps its clients"
    assert {version_at(place, (0.0, 100.0), [True, False]) for place in places} == {0}, (
        "a share of 0 is better than an error"
    )
    assert {version_at(place, (0.0, 100.0), [False, False]) for place in places} == {1}
    assert {version_at(place, (100.0, 0.0), [True, True]) for place in (0.0, 0.999999999, 1.0)} == {0}


@pytest.mark.parametrize(
    ("shares", "given", "found"),
    [
        ({"m": 100.0, "m@2": 0.0}, {"m@2": 5.0}, {"m": 95.0, "m@2": 5.0}),
        ({"m": 60.0, "m@2": 30.0, "m@3": 10.0}, {"m@3": 55.0}, {"m": 30.0, "m@2": 15.0, "m@3": 55.0}),
        ({"m": 0.0, "m@2": 100.0, "m@3": 0.0}, {"m@2": 50.0}, {"m": 25.0, "m@2": 50.0, "m@3": 25.0}),
        ({"m": 95.0, "m@2": 5.0}, {"m@2": "shadow"}, {"m": 100.0, "m@2": "shadow"}),
        ({"m@2": 5.0, "m@3": "shadow"}, {}, {"m@2": 100.0, "m@3": "shadow"}),
        ({"m": 90.0, "m@2": 10.0}, {"m": 20.0, "m@2": 70.0}, None),
        ({"m": 90.0, "m@2": 10.0}, {"m": 20.0, "m@2": 90.0}, None),
        ({"m": 100.0}, {"m": "shadow"}, None),
    ],
)
def test_versions_without_a_given_share_divide_the_rest(
    shares: Mapping[str, Share], given: Mapping[str, Share], found: Mapping[str, Share] | None
) -> None:
    if found is not None:
        assert divide(shares, given) == found
        return
    with pytest.raises(UserError, match="must be 100 % together"):
        divide(shares, given)


def test_initial_shares_leave_the_rest_to_the_first_version() -> None:
    given: dict[str, Share | None] = {"a": None, "b@1": None, "b@2": 5.0, "b@3": None, "c@2": None, "c@7": "shadow"}
    expected = {"a": 100.0, "b@1": 95.0, "b@2": 5.0, "b@3": 0.0, "c@2": 100.0, "c@7": "shadow"}
    assert initial_shares(given) == expected
    thirds = divide({"a": 50.0, "b": 25.0, "c": 25.0}, {"a": 100 / 3})
    assert divide({}, thirds) == thirds


def test_command_names_versions_by_their_numbers(tmp_path: Path) -> None:
    shares = Shares(str(tmp_path / "shares"), {"m": None, "m@2": None, "other": None})
    assert shares.parsed("m", {"1": "90", "2": "10.5"}) == {"m": 90.0, "m@2": 10.5}
    assert shares.parsed("m", {"2": "shadow"}) == {"m@2": "shadow"}
    for texts, why in (
        ({"3": "5"}, "no version '3'; its versions are 1, 2"),
        ({"2": "101"}, "0 to 100"),
        ({"2": "nan"}, "0 to 100"),
    ):
        with pytest.raises(UserError, match=why):
            shares.parsed("m", texts)
    assert [Shares.key(name, shares.now) for name in ("m@1", "m@2", "other", "other@1", "new")] == [
        "m",
        "m@2",
        "other",
        "other",
        "new",
    ]
    with pytest.raises(UserError, match="several versions; name one of m@1, m@2"):
        Shares.key("m", shares.now)
    shares.set(shares.divided("m", shares.now, {"m@2": 5.0}))
    assert json.loads((tmp_path / "shares").read_text()) == {"m": 95.0, "m@2": 5.0, "other": 100.0}


class Frontend:
    """A frontend with versions of one model.

    Args:
        models: what each version serves, by name.
    """

    def __init__(self, folder: Path, models: Mapping[str, ServedModel], keys: KeySet | None = None) -> None:
        self.metrics, self.file = FrontendMetrics(), folder / "shares"
        self.predictors = {name: ColourPredictor(serves=replace(model, name=name)) for name, model in models.items()}
        self.inferences = {
            name: Inference(self.predictors[name], model, RequestLimits()) for name, model in models.items()
        }
        self.groups = ModelGroups(
            *(group_of(self.predictors[name], self.metrics, each, name=name) for name, each in self.inferences.items()),
            shares_file=self.file,
            share_by="X-Client",
        )
        authorizer = None if keys is None else Authorizer(ApiKeys(keys, KeySet()))
        self.app = create_api(self.groups, self.metrics, authorizer)

    def share(self, **shares: Share) -> None:
        """Set the shares: v2=5 of m@2, and so on."""
        self.file.write_text(json.dumps({f"m@{name[1:]}": share for name, share in shares.items()}))
        self.groups.read_shares()

    def sample(self, name: str, **labels: str) -> float:
        """The current value of a series, 0 without it."""
        return self.metrics.registry.get_sample_value(f"multiworld_{name}", labels) or 0.0

    async def versions(self, client: httpx.AsyncClient, count: int, **headers: str) -> Counter[str]:
        """How many of these requests each version has answered."""
        found = Counter[str]()
        for _ in range(count):
            response = await client.post("/v2/models/m/infer", json=INFER, headers=headers)
            assert response.status_code == 200, response.text
            assert response.json()["model_name"] == "m"
            assert response.json()["model_version"] == response.headers["X-Model-Version"]
            found[response.headers["X-Model-Version"]] += 1
        return found


@asynccontextmanager
async def frontend(
    folder: Path, keys: KeySet | None = None, **models: ServedModel
) -> AsyncIterator[tuple[Frontend, httpx.AsyncClient]]:
    """A frontend with the versions m and m@2 of a model, or with these."""
    found = models or {"m": MODEL, "m@2": MODEL}
    running = Frontend(
        folder, {name.replace("_", "@"): replace(model, name="m") for name, model in found.items()}, keys
    )
    async with AsyncExitStack() as stack:
        for each in running.inferences.values():
            await stack.enter_async_context(each.threads)
        yield running, await stack.enter_async_context(client_of(running.app))


async def test_plain_name_follows_the_shares_and_a_version_in_the_path_does_not(tmp_path: Path) -> None:
    async with frontend(tmp_path) as (running, client):
        assert await running.versions(client, 20) == {"1": 20}, "without shares, the first version has all requests"
        running.share(v1=75, v2=25)
        assert await running.versions(client, 40) == pytest.approx({"1": 30, "2": 10}, abs=1)
        for version in "12":
            pinned = await client.post(f"/v2/models/m/versions/{version}/infer", json=INFER)
            assert (pinned.status_code, pinned.json()["model_version"]) == (200, version)
        assert (await client.post("/v2/models/m@2/infer", json=INFER)).json()["model_version"] == "2"
        unknown = await client.post("/v2/models/m/versions/3/infer", json=INFER)
        assert (unknown.status_code, "its versions are 1, 2" in unknown.text) == (404, True)
        assert (await client.get("/v2/models")).json() == {"models": ["m"]}
        assert (await client.get("/v2/models/m")).json()["versions"] == ["1", "2"]
        assert (await client.get("/v2/models/m/versions/2/stats")).json()["model_stats"][0]["version"] == "2"
        index = (await client.post("/v2/repository/index")).json()
        assert [(each["name"], each["share"]) for each in index] == [("m", 75), ("m@2", 25)]
        status = (await client.get("/status?model=m@2")).json()
        assert (status["shares"], status["models"]) == ({"m": 75, "m@2": 25}, {"m": "ready", "m@2": "ready"})
        assert set((await client.get("/openapi.json")).json()["paths"]) >= {"/predict", "/v2/models/{model}/infer"}
        counted = {name: running.sample("images_total", model=name, version=MODEL.version) for name in ("m", "m@2")}
        assert sum(counted.values()) == 63
        assert running.sample("model_share_percent", model="m@2") == 25
        for _ in range(8):
            response = await client.post("/predict/m", files={"image": image_bytes("blue")})
            assert response.json()["version"] == response.headers["X-Model-Version"]
        assert (await client.post("/predict", files={"image": image_bytes("blue")})).json()["model"] == "m"
        running.file.write_text("{")
        running.groups.read_shares()
        assert running.groups.named("m@2").share == 25, "an invalid file changes nothing"


async def test_clients_stay_on_their_version_while_it_is_ready(tmp_path: Path) -> None:
    async with frontend(tmp_path) as (running, client):
        running.share(v1=50, v2=50)
        names = [str(each) for each in range(20)]
        before = {name: await running.versions(client, 3, **{"x-client": name}) for name in names}
        assert {len(found) for found in before.values()} == {1}
        assert len({next(iter(found)) for found in before.values()}) == 2
        running.predictors["m@2"].states = ("broken",)
        assert await running.versions(client, 20) == {"1": 20}
        assert (await client.get("/v2/health/ready")).status_code == 200
        assert (await client.get("/v2/models/m/ready")).json() == {"name": "m", "ready": True}
        assert (await client.get("/v2/models/m/versions/2/ready")).status_code == 503
        running.predictors["m@2"].states = ("ready",)
        assert before == {name: await running.versions(client, 3, **{"x-client": name}) for name in names}


async def test_key_of_a_model_permits_all_of_its_versions(tmp_path: Path) -> None:
    keys = parse_keys(f"alice:{hash_key('one')}:m\nbob:{hash_key('two')}:other", "keys")
    async with frontend(tmp_path, keys) as (_, client):
        for key, status in (("one", 200), ("two", 403)):
            for path in ("/v2/models/m/infer", "/v2/models/m/versions/2/infer", "/v2/models/m@2/infer"):
                response = await client.post(path, json=INFER, headers={"Authorization": f"Bearer {key}"})
                assert response.status_code == status, response.text


async def copies(running: Frontend, count: int) -> dict[str, float]:
    """Wait until this number of copies is counted. Returns the number of each outcome."""
    outcomes = ("equal", "different", "failed", "incompatible", "dropped")

    def counted() -> dict[str, float]:
        return {each: running.sample("shadow_requests_total", model="m@2", outcome=each) for each in outcomes}

    await until(lambda: sum(counted().values()) == count)
    return {outcome: number for outcome, number in counted().items() if number}


def timed(queue_s: float, compute_s: float, rows: torch.Tensor) -> Prediction:
    """The model's class, after these times."""
    answer = opposite(rows)
    return msgspec.structs.replace(answer, output=-answer.output, queue_s=queue_s, compute_s=compute_s)


def opposite(rows: torch.Tensor) -> Prediction:
    """Another class than the model's."""
    return Prediction(-rows.float().mean(dim=(2, 3)), MODEL.name, MODEL.version, 0.0, 0.0, 0.0, 1, ("s0.r0",))


async def test_shadow_gets_copies_whose_results_are_counted_and_never_returned(tmp_path: Path) -> None:
    async with frontend(tmp_path) as (running, client):
        running.share(v1=100, v2="shadow")
        shadow, image = running.predictors["m@2"], {"image": image_bytes("blue")}
        for number, change in enumerate(("none", "another class", "error", "not ready")):
            await copies(running, number)
            shadow.answer = opposite if change == "another class" else None
            shadow.failure = OverloadedError("full") if change == "error" else None
            shadow.states = ("broken",) if change == "not ready" else ("ready",)
            response = await client.post("/predict", files=image)
            assert (response.status_code, response.headers["X-Model-Version"]) == (200, "1")
            assert response.json()["predictions"][0]["label"] == "blue"
        assert await copies(running, 4) == {"equal": 1, "different": 1, "failed": 1, "dropped": 1}
        assert running.sample("images_total", model="m@2", version=MODEL.version) == 0
        assert [status for status, _ in running.groups.named("m@2").requests.take_recent()] == [200, 200, 429]
        assert (await client.get("/v2/health/ready")).status_code == 200


async def test_busy_shadow_delays_no_request(tmp_path: Path) -> None:
    async with frontend(tmp_path) as (running, client):
        running.share(v1=100, v2="shadow")
        running.predictors["m@2"].proceed = asyncio.Event()
        assert await running.versions(client, 20) == {"1": 20}, "while the shadow answers nothing"
        assert await copies(running, 12) == {"dropped": 12}, "8 are in flight"
        running.predictors["m@2"].proceed.set()
        assert await copies(running, 20) == {"equal": 8, "dropped": 12}


async def test_requests_that_waited_for_a_worker_are_not_copied(tmp_path: Path) -> None:
    async with frontend(tmp_path) as (running, client):
        running.share(v1=100, v2="shadow")
        for number, (queue_s, compute_s) in enumerate([(0.011, 0.01), (0.011, 0.02), (0.009, 0.0), (0.2, 0.1)], 1):
            running.predictors["m"].answer = partial(timed, queue_s, compute_s)
            assert await running.versions(client, 1) == {"1": 1}
            await copies(running, number)
        assert await copies(running, 4) == {"equal": 2, "dropped": 2}


async def test_shadow_with_other_inputs_gets_no_copies(tmp_path: Path) -> None:
    other = replace(MODEL, image=MODEL.image._replace(resize_size=17) if MODEL.image else None)
    async with frontend(tmp_path, m=MODEL, m_2=other) as (running, client):
        running.share(v1=100, v2="shadow")
        assert await running.versions(client, 3) == {"1": 3}
        assert await copies(running, 3) == {"incompatible": 3}
