"""The examples of models run as their READMEs say, and the services answer like the models."""

import importlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from examples.digits import train as digits
from examples.segmentation.pipeline import SIZE, pixels
from examples.text_classifier import model as text_model
from examples.text_classifier.pipeline import tokens
from multiworld_serving.cli.main import main
from multiworld_serving.common.service.predictor import ImageSizes
from multiworld_serving.models.bundle.files import read_bundle
from multiworld_serving.server.frontend.api.images import image_tensor
from multiworld_serving.testing.local_service import LocalService
from tests.documents import settings_of

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
    ids = torch.tensor([tokens(text)])
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


@pytest.mark.parametrize(
    ("example", "check"),
    [
        ("own_model", check_labels),
        ("fine_tuned", check_labels),
        ("vision_transformer", check_labels),
        ("text_classifier", check_text),
        ("segmentation", check_segmentation),
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
    *prepare, serve, ask = commands(example)
    for words in prepare:
        run(words, "", capsys)
    assert serve[:2] == ["multiworld", "serve"]
    settings: dict[str, Any] = dict(settings_of(serve[2:]))
    with LocalService(heartbeat_timeout_s=10, **settings) as service:
        check(run(ask, service.url, capsys), next(tmp_path.rglob("*.bundle")))


def test_digits_are_trained_and_written(tmp_path: Path) -> None:
    state, images, labels = digits.train(0, epochs=1)
    digits.write(tmp_path, state, images, labels)
    assert len((tmp_path / "held_out.csv").read_text().splitlines()) == 1 + len(images)
