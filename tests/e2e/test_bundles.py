"""Models of the user's own, exported and served in three stages; workers are killed under load."""

import os
import signal
import threading
from functools import partial
from pathlib import Path

import httpx
import torch

from multiworld_client import Client, ClientError
from multiworld_serving.testing.load.images import photos
from multiworld_serving.testing.local_service import LocalService
from tests.bundles import Text, classifier_bundle, text_bundle
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


_HANDLER = """
import json
import numpy as np

class Handler:
    def decode(self, body, content_type):
        words = body.decode().split()
        if len(words) < 2:
            raise ValueError("expected at least two words")
        ids = np.array([[len(word) for word in words]])
        return {"ids": ids, "mask": ids > 3}

    def encode(self, outputs):
        return json.dumps({"long words": int(outputs["count"][0])}).encode(), "application/json"
"""


def test_killed_workers_cost_no_request_of_a_transformer_with_variable_lengths(tmp_path: Path) -> None:
    text_bundle(tmp_path / "text")
    (tmp_path / "words.py").write_text(_HANDLER)
    model = Text().eval()
    with LocalService(
        model=str(tmp_path / "text"), stages=3, replicas=2, max_batch_size=8, handler=f"{tmp_path / 'words.py'}:Handler"
    ) as service:
        answer = httpx.post(f"{service.url}/predict", content="a transformer answers", timeout=60)
        assert (answer.status_code, answer.json()) == (200, {"long words": 2})
        refused = httpx.post(f"{service.url}/predict", content="one", timeout=60)
        assert (refused.status_code, refused.json()["error"]) == (400, "expected at least two words")
        wrong: list[object] = []
        answered, stop = [0], threading.Event()

        def load(seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            with Client(service.url, timeout_s=60) as client:
                while not stop.is_set():
                    rows, tokens = (int(torch.randint(*each, (), generator=generator)) for each in ((1, 4), (2, 33)))
                    ids = torch.randint(0, 50, (rows, tokens), generator=generator)
                    mask = ids > 10
                    with torch.inference_mode():
                        expected = model(ids, mask)
                    try:
                        found = client.infer({"ids": ids, "mask": mask})
                    except ClientError as error:
                        wrong.append(error)
                        continue
                    answered[0] += 1
                    vector, count = torch.from_numpy(found["vector"]), torch.from_numpy(found["count"])
                    if not torch.allclose(vector, expected["vector"], atol=1e-4) or not count.equal(expected["count"]):
                        wrong.append((ids.shape, found))

        threads = [threading.Thread(target=load, args=(seed,)) for seed in range(3)]
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
