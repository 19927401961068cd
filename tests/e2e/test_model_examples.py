"""The examples of models run as their READMEs say, and the services answer like the models."""

import importlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from examples.digits import train as digits
from examples.segmentation.pipeline import SIZE, pixels
from examples.text_classifier import model as text_model
from examples.text_classifier.pipeline import Tokenize
from multiworld_serving.cli.main import main
from multiworld_serving.common.service.predictor import ImageSizes
from multiworld_serving.models.bundle.files import read_bundle
from multiworld_serving.models.stages.api import Request
from multiworld_serving.models.stages.local import LocalPipeline
from multiworld_serving.models.stages.pipeline import PipelineSource
from multiworld_serving.models.stages.responses import response_of
from multiworld_serving.server.frontend.api.images import image_tensor
from multiworld_serving.testing.load.clients import run_load
from multiworld_serving.testing.load.requests import ReferenceRequest, answer_values
from multiworld_serving.testing.local_service import LocalService, RunningService
from tests.documents import settings_of
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
DOCUMENTED_URL = "http://127.0.0.1:8000"


def commands(example: str) -> list[list[str]]:
    """The indented lines of the README, as words."""
    text = (ROOT / "examples" / example / "README.md").read_text()
    return [shlex.split(line) for line in re.findall(r"^ {7}(\S.*)$", text, re.MULTILINE)]


def run(words: list[str], url: str, capsys: pytest.CaptureFixture[str]) -> bytes:
    """One command of a README that is not `multiworld serve`. Returns what it prints or gets."""
    match words:
        case ["multiworld", "predict", *further]:
            capsys.readouterr()
            assert main(["predict", *further, "--json", "--url", url]) == 0
            return capsys.readouterr().out.encode()
        case ["multiworld", *arguments]:
            assert main(arguments) == 0
        case ["python", "-m", module, *arguments]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", [module, *arguments])
                importlib.import_module(module).main()
        case ["curl", *options, address]:
            address = address.replace(DOCUMENTED_URL, url)
            return subprocess.run(
                ["curl", "--fail-with-body", *options, address], check=True, capture_output=True
            ).stdout
        case other:
            pytest.fail(f"the test does not know {other}")
    return b""


def check_labels(answer: bytes, bundle: Path) -> None:
    """The labels and probabilities are those of the bundle."""
    model = read_bundle(bundle)
    image = model.manifest.image
    assert image is not None
    photo = Path("examples/images/clock.jpg").read_bytes()
    pixels = image_tensor(photo, ImageSizes(image.resize_size, image.crop_size), 10**8)
    with torch.inference_mode():
        (expected,) = model.build(model.graph)(pixels[None])
    found = json.loads(answer)["predictions"]
    assert len(found) >= 3
    best = expected[0].topk(len(found))
    assert [each["label"] for each in found] == [model.manifest.labels[index] for index in best.indices]
    assert [each["probability"] for each in found] == pytest.approx(best.values.tolist(), 1e-3)


def check_text(answer: bytes, bundle: Path) -> None:
    (text,) = (words[5] for words in commands("text_classifier") if words[0] == "curl")
    tokenize = Tokenize()
    tokenize.setup()
    ids = torch.tensor([tokenize.row(text)["ids"]])
    assert len(set(ids[0].tolist())) > 8
    with torch.inference_mode():
        (expected,) = text_model.make().eval()(ids, ids > 0).tolist()
    assert list(json.loads(answer).values()) == pytest.approx(expected, rel=1e-3)


def check_segmentation(answer: bytes, bundle: Path) -> None:
    with Image.open("classes.png") as image:
        assert (image.size, image.mode) == ((SIZE, SIZE), "P")
        found = torch.from_numpy(np.array(image))
    with Image.open("examples/images/clock.jpg") as photo:
        body = io.BytesIO()
        photo.save(body, "PNG")
    given = torch.from_numpy(pixels(body.getvalue()))[None]
    with torch.inference_mode():
        (expected,) = read_bundle(bundle).build(read_bundle(bundle).graph)(given)
    assert (found == expected[0].argmax(0)).float().mean() > 0.99  # two classes may be equally good


def check_pipeline(attribute: str, image: str = "") -> Callable[[bytes, Path], None]:
    """The response is that of `multiworld check`."""

    def check(answer: bytes, _: Path) -> None:
        (example,) = {"labelled": ["detection"], "pipeline": ["iris"]}[attribute]
        body = Path("examples/images", image).read_bytes() if image else commands(example)[-1][5].encode()
        source = PipelineSource.parse(f"examples/{example}/pipeline.py:{attribute}")
        assert source is not None
        expected = response_of(LocalPipeline(source.load()).result(Request(body, "image/jpeg"))).body
        assert json.loads(answer) == json.loads(expected)

    return check


def check_kills(service: LocalService, ask: list[str]) -> None:
    """Workers of all stages are killed under load: no request fails, and every response is the one without load."""
    given, path = ask[ask.index("--data-binary") + 1], ask[-1].removeprefix(DOCUMENTED_URL)
    body = Path(given[1:]).read_bytes() if given.startswith("@") else given.encode()
    request = ReferenceRequest(body, ask[3].partition(": ")[2], path=path)
    model = path.removeprefix("/predict/") if path.startswith("/predict/") else None
    with httpx.Client(timeout=60) as client:
        answer = client.post(service.url + path, content=body, headers=request.headers).raise_for_status()
    request = replace(request, expected=answer_values(answer))
    running = RunningService(service.url, model=model)
    with run_load(service.url, [request], clients=4) as load:
        for stage in range(len(running.status()["stages"])):
            count = len(load.samples)
            victim = running.status()["stages"][stage]["replicas"][0]
            os.kill(victim["pid"], signal.SIGKILL)

            def is_replaced(stage: int = stage, old: int = victim["pid"], count: int = count) -> bool:
                found = running.status()["stages"][stage]["replicas"]
                return len(load.samples) > count + 4 and all(
                    each["state"] == "ready" and each["pid"] != old for each in found
                )

            wait_until(is_replaced)
    assert not load.failed


@pytest.mark.parametrize(
    ("example", "check"),
    [
        ("own_model", check_labels),
        ("fine_tuned", check_labels),
        ("vision_transformer", check_labels),
        ("text_classifier", check_text),
        ("segmentation", check_segmentation),
        ("detection", check_pipeline("labelled", "clock.jpg")),
        ("iris", check_pipeline("pipeline")),
    ],
)
def test_commands_of_the_readme_serve_the_model(
    example: str,
    check: Callable[[bytes, Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    listed = commands(example)
    at = next(index for index, words in enumerate(listed) if words[:2] == ["multiworld", "serve"])
    prepare, serve, asks = listed[:at], listed[at], listed[at + 1 :]
    for words in prepare:
        run(words, "", capsys)
    settings: dict[str, Any] = {}
    for name, value in settings_of(serve[2:]):
        settings[name] = f"{settings[name]},{value}" if name in settings else value
    with LocalService(heartbeat_timeout_s=10, hang_timeout_s=100, timeout_s=200, **settings) as service:
        wait_until(lambda: httpx.get(f"{service.url}/v2/health/ready").is_success)
        answers = [run(ask, service.url, capsys) for ask in asks]
        check(answers[-1], next(tmp_path.rglob("*.bundle"), tmp_path))
        if ".py:" in settings["model"]:
            check_kills(service, asks[-1])


def test_digits_are_trained_and_written(tmp_path: Path) -> None:
    state, images, labels = digits.train(0, epochs=1)
    digits.write(tmp_path, state, images, labels)
    assert len((tmp_path / "held_out.csv").read_text().splitlines()) == 1 + len(images)
