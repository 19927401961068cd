"""A model of the user's own, exported and served in three stages; workers are killed under load."""

import os
import signal
import threading
from functools import partial
from pathlib import Path

import httpx
import torch

from multiworld_serving.testing.load.images import photos
from multiworld_serving.testing.local_service import LocalService
from tests.bundles import classifier_bundle
from tests.waiting import wait_until


def _passed(counter: list[int], count: int) -> bool:
    return counter[0] > count


def test_killed_workers_cost_no_request_of_an_exported_model(tmp_path: Path) -> None:
    classifier_bundle(tmp_path / "one")
    classifier_bundle(tmp_path / "two", seed=1, version="2")
    with LocalService(
        model=str(tmp_path / "one"), weights_dir=tmp_path, stages=3, replicas=2, max_batch_size=8
    ) as service:
        images = [
            httpx.Request("POST", f"{service.url}/predict", content=body, headers={"content-type": kind})
            for body, kind in photos(4)
        ]

        def ask(client: httpx.Client, number: int) -> list[float]:
            response = client.send(images[number])
            assert response.status_code == 200, response.text
            return [each["probability"] for each in response.json()["predictions"]]

        with httpx.Client(timeout=60) as client:
            expected = [ask(client, number) for number in range(len(images))]
        assert max(map(max, expected)) > 0.3
        wrong: list[object] = []
        answered, stop = [0], threading.Event()

        def load() -> None:
            with httpx.Client(timeout=60) as client:
                while not stop.is_set():
                    for number in range(len(images)):
                        try:
                            found = ask(client, number)
                        except (AssertionError, httpx.HTTPError) as error:
                            wrong.append(error)
                            continue
                        answered[0] += 1
                        if not torch.allclose(torch.tensor(found), torch.tensor(expected[number]), atol=1e-4):
                            wrong.append((number, found))

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        for stage in range(3):
            before = answered[0]
            os.kill(service.status()["stages"][stage]["replicas"][0]["pid"], signal.SIGKILL)
            wait_until(partial(_passed, answered, before + 10))
        stop.set()
        for thread in threads:
            thread.join()
        assert not wrong
