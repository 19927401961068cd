"""Two versions of a model side by side, under load: a canary, failures of both versions, a shadow, and the removal of the former one."""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence

import httpx
import numpy as np
import pytest
import torch
import tritonclient.grpc

from multiworld_serving.cli.main import main
from multiworld_serving.models.export.torchvision_models import load_model
from multiworld_serving.testing.load.clients import Load, Sample, run_load
from multiworld_serving.testing.local_service import LocalService
from tests.services import small_service
from tests.versioned_requests import VersionedRequest, versioned_requests
from tests.waiting import wait_until

MODEL, SECOND, SIDE = "resnet18", "resnet18@2", 32
WORKERS = {MODEL: "worker", SECOND: "resnet18.2-worker"}
FRONTENDS, REPLICAS, COUNT = 2, 2, 300
RATE_HZ = 40
GROWTH_KIB = 4096
CHANGES = 20


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    with small_service(replicas=REPLICAS, frontends=FRONTENDS, grpc_port=0, share_by="x-client") as running:
        yield running


@pytest.fixture(scope="module")
def requests() -> Sequence[VersionedRequest]:
    """Images of the model's size, with what each version answers."""
    images = torch.randint(0, 256, (8, 3, SIDE, SIDE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        answers = {
            version: load_model(MODEL, f"random:{seed}", image_size=SIDE).classifier()(images)
            for seed, version in enumerate("123")
        }
    answers["random:0"] = answers["1"]  # while it is the only version
    return versioned_requests(images, answers, "x-model-version")


def models(service: LocalService, *arguments: str) -> int:
    return main(["models", *arguments, "--url", service.url])


def set_share(service: LocalService, version: int, share: float) -> None:
    """Change the share, and wait until both frontends use it."""
    assert models(service, "share", MODEL, f"{version}={share:g}") == 0
    found = {"model": f"{MODEL}@{version}"}
    wait_until(lambda: service.metric("multiworld_model_share_percent", **found) == FRONTENDS * share)


def is_whole(service: LocalService, model: str) -> bool:
    status = httpx.get(f"{service.url}/status", params={"model": model}, timeout=60).json()
    return [each["state"] for each in status["stages"][0]["replicas"]] == ["ready"] * REPLICAS


def failed(load: Load) -> list[Sample]:
    """A client that is idle for a second may find its connection closed after a change of the models."""
    return [each for each in load.failed if "disconnected" not in each.error]


def kill_a_worker_of_each_version(service: LocalService) -> None:
    """Kill, and wait until others have taken their places."""
    for model, kind in WORKERS.items():
        before = service.child_pids(kind)
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: service.child_pids(kind)[0] != before[0])  # noqa: B023
        wait_until(lambda: is_whole(service, model))  # noqa: B023


def test_canary_gets_its_share_while_workers_of_both_versions_die(
    service: LocalService, requests: Sequence[VersionedRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = requests[0].seen
    with run_load(service.url, requests, rate_hz=RATE_HZ) as load:
        wait_until(lambda: seen["random:0"])
        assert models(service, "add", f"{SECOND}={MODEL}", "--set", "weights=random:1") == 0
        assert "resnet18@2 READY share=0" in capsys.readouterr().out
        assert not seen["2"], "an added version gets no requests without a share"
        for share in (5, 50, 100):
            set_share(service, 2, share)
            wait_until(lambda: is_whole(service, MODEL) and is_whole(service, SECOND))
            before, total = seen["2"], seen.total()
            wait_until(lambda: seen.total() >= total + COUNT)  # noqa: B023
            found = 100 * (seen["2"] - before) / (seen.total() - total)
            assert abs(found - share) <= 2, found
            if share == 50:
                kill_a_worker_of_each_version(service)
        assert models(service, "add", f"{MODEL}@3=unknown", "--share", "50") == 1, "it cannot be loaded"
        assert models(service, "remove", f"{MODEL}@1") == 0
        assert "resnet18@2 READY share=100" in capsys.readouterr().out
        before = seen["2"]
        wait_until(lambda: seen["2"] > before + 20)
    assert not failed(load), failed(load)[:3]
    for path, status in ((f"{MODEL}/versions/1", 404), (f"{MODEL}/versions/2", 200), (MODEL, 200)):
        assert httpx.get(f"{service.url}/v2/models/{path}/ready", timeout=60).status_code == status


def tcp_sockets() -> set[str]:
    """TCP sockets of this machine, as links of descriptors name them: clients open and close them as the load goes."""
    with open("/proc/net/tcp", encoding="utf-8") as file:
        return {f"socket:[{line.split()[9]}]" for line in file.readlines()[1:]}


def descriptors(pid: int) -> int:
    """Descriptors of a process without its TCP connections."""
    links = []
    for descriptor in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(descriptor))
    tcp = tcp_sockets()
    return sum(link not in tcp for link in links)


def usage(pid: int) -> dict[str, int]:
    """Descriptors, threads, and memory in KiB of a process."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        fields = dict(line.split(":", 1) for line in file)
    memory_kib = sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return {"descriptors": descriptors(pid), "threads": int(fields["Threads"]), "kib": memory_kib}


def test_shadow_is_compared_and_never_returned_and_changes_of_shares_leave_nothing_behind(
    service: LocalService, requests: Sequence[VersionedRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    seen, third = requests[0].seen, f"{MODEL}@3"
    with run_load(service.url, requests, rate_hz=RATE_HZ) as load:
        assert models(service, "add", f"{third}={MODEL}", "--set", "weights=random:2", "--shadow") == 0
        wait_until(lambda: service.metric("multiworld_shadow_requests_total", model=third, outcome="different") > 20)
        assert service.metric("multiworld_shadow_requests_total", model=third, outcome="failed") == 0
        assert not seen["3"]
        assert models(service, "list") == 0
        assert "resnet18@3 READY share=shadow requests=0 errors=0" in capsys.readouterr().out
        set_share(service, 3, 50)
        processes = [service.pid, *service.child_pids("frontend").values()]
        before = [usage(pid) for pid in processes]
        for number in range(CHANGES):
            set_share(service, 3, 5 * number)
        # One that is being closed is no TCP socket any more, but a descriptor for a moment.
        limits = {pid: each["descriptors"] + 1 for pid, each in zip(processes, before, strict=True)}
        wait_until(lambda: all(descriptors(pid) <= limit for pid, limit in limits.items()))
        after = [usage(pid) for pid in processes]
        assert seen["3"], "the shadow serves"
        leader = service.child_pids("resnet18.3-leader")[0]
        os.kill(leader, signal.SIGKILL)  # its share goes to the other version until it is back
        wait_until(lambda: service.child_pids("resnet18.3-leader")[0] != leader and is_whole(service, third))
    assert not failed(load), failed(load)[:3]
    for old, new in zip(before, after, strict=True):
        assert new["kib"] <= old["kib"] + GROWTH_KIB, (before, after)
        assert new["threads"] < old["threads"] + CHANGES // 4, (before, after)  # pools start threads on demand


def test_grpc_chooses_versions_as_http_does(service: LocalService) -> None:
    """After the tests above: the versions 2 and 3 serve."""
    set_share(service, 3, 50)
    image = tritonclient.grpc.InferInput("input", [1, 3, SIDE, SIDE], "UINT8")
    image.set_data_from_numpy(np.full((1, 3, SIDE, SIDE), 7, np.uint8))
    with tritonclient.grpc.InferenceServerClient(service.grpc_address) as client:

        def version(model_version: str = "", **headers: str) -> str:
            found = client.infer(MODEL, [image], model_version=model_version, headers=headers).get_response()
            assert found.model_name == MODEL
            return str(found.model_version)

        assert {version() for _ in range(10)} == {"2", "3"}
        assert [version(each) for each in "2323"] == [*"2323"]
        of_clients = [[version(**{"x-client": str(each)}) for _ in range(3)] for each in range(12)]
        assert all(len(set(each)) == 1 for each in of_clients)
        assert {each[0] for each in of_clients} == {"2", "3"}
        over_http = [
            httpx.get(f"{service.url}/v2/models/{MODEL}", timeout=60).json()["versions"],
            client.get_model_metadata(MODEL, as_json=True)["versions"],
        ]
        assert over_http == [["2", "3"]] * 2
        with pytest.raises(tritonclient.grpc.InferenceServerException, match="its versions are 2, 3"):
            version("1")
