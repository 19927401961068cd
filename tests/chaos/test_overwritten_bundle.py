"""A bundle is overwritten and leaders are killed under load: each response is what the content with its digest computes.

`MULTIWORLD_TORTURE_S` sets the duration.
"""

import contextlib
import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch

from multiworld_serving.models.bundle.files import Bundle
from multiworld_serving.testing.load.clients import run_load
from multiworld_serving.testing.local_service import LocalService
from tests.bundles import SIZE, classifier_bundle
from tests.e2e.images import png
from tests.versioned_requests import versioned_requests
from tests.waiting import wait_until

DURATION_S = float(os.environ.get("MULTIWORLD_TORTURE_S", "8"))

pytestmark = pytest.mark.timeout(DURATION_S + 300)


def overwrite(path: Path, content: Path) -> None:
    """File by file, so that a leader may read a mixture."""
    shutil.copytree(content, path, dirs_exist_ok=True)


def test_first_leader_leaves_its_workers_to_the_one_that_has_the_content_of_the_group(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first, _ = (classifier_bundle(tmp_path / path, seed).digest for seed, path in enumerate(("served", "other/served")))
    body = png(torch.zeros(3, SIZE, SIZE, dtype=torch.uint8))
    with (
        LocalService(model=tmp_path / "served", stages=1, replicas=2, leaders=2, heartbeat_timeout_s=10) as service,
        httpx.Client(timeout=60) as client,
    ):

        def leaders() -> list[tuple[str, bool]]:
            """State, and whether it has other content."""
            return [(each["state"], bool(each["obstacle"])) for each in service.status()["leaders"]]

        def is_replaced(worker: str, pid: int) -> bool:
            replicas = [replica for stage in service.status()["stages"] for replica in stage["replicas"]]
            return any(
                each["worker"] == worker and each["state"] == "ready" and each["pid"] != pid for each in replicas
            )

        (tmp_path / "served").rename(tmp_path / "before")  # the second leader can still read it
        (tmp_path / "other/served").rename(tmp_path / "served")
        kill(service, 0)
        wait_until(lambda: leaders() == [("not_ready", True), ("ready", False)])
        for name, pid in service.worker_pids().items():
            os.kill(pid, signal.SIGKILL)
            wait_until(partial(is_replaced, name, pid))
            service.wait_until_complete(150)
            response = client.post(f"{service.url}/predict", content=body, headers={"content-type": "image/png"})
            assert response.headers["x-model-digest"] == first
        assert leaders() == [("not_ready", True), ("ready", False)]


def kill(service: LocalService, *slots: int) -> None:
    """Kill these leaders, and wait until the supervisor has started others."""
    pids = service.child_pids("leader")
    for slot in slots:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself: it has read a mixture
            os.kill(pids[slot], signal.SIGKILL)
    wait_until(lambda: all(service.child_pids("leader")[slot] != pids[slot] for slot in slots))


def test_no_response_is_of_another_content_than_its_digest_when_the_bundle_is_overwritten(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (8, 3, SIZE, SIZE), dtype=torch.uint8, generator=generator)
    served, contents, bundles = tmp_path / "served", dict[str, Path](), dict[str, Bundle]()
    for seed in (1, 2):  # both with the label "1"
        bundle = classifier_bundle(tmp_path / f"content-{seed}", seed)
        contents[bundle.digest], bundles[bundle.digest] = tmp_path / f"content-{seed}", bundle
    with torch.inference_mode():
        expected = {digest: bundle.build(bundle.graph)(images)[0] for digest, bundle in bundles.items()}
    first, second = contents
    overwrite(served, contents[first])
    requests = versioned_requests(images, expected, "x-model-digest")

    def wait_for_responses(*wanted: str) -> None:
        seen = sum(requests[0].seen[digest] for digest in wanted)
        wait_until(lambda: sum(requests[0].seen[digest] for digest in wanted) > seen + 20)

    chance, ends_s = random.Random(0), time.monotonic() + DURATION_S
    with (
        LocalService(model=served, stages=2, replicas=2, leaders=2, heartbeat_timeout_s=10) as service,
        run_load(service.url, requests, rate_hz=20) as load,
    ):
        while time.monotonic() < ends_s:
            overwrite(served, contents[chance.choice([first, second])])
            kill(service, chance.randrange(2))
            wait_for_responses(first, second)
        for digest in (second, first):  # when no leader has the former content, the service has the new one
            overwrite(served, contents[digest])
            kill(service, 0, 1)
            wait_for_responses(digest)
    # While both leaders read a mixture, requests are refused.
    assert not [sample for sample in load.failed if sample.status == 200]
