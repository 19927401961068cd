"""The examples of models run as their READMEs say, and the services answer like the models."""

import importlib
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.models import resnet18

from examples.fine_tuned import fine_tune
from examples.own_model import classifier
from examples.segmentation.handler import SIZE, Handler
from examples.text_classifier import model as text_model
from examples.text_classifier.handler import tokens
from examples.vision_transformer import vit
from multiworld_serving.cli.main import main
from multiworld_serving.models.bundle.files import read_bundle
from multiworld_serving.models.preprocessing import Normalize
from multiworld_serving.server.api.images import image_tensor
from multiworld_serving.testing.local_service import LocalService

ROOT = Path(__file__).parents[2]
DOCUMENTED_URL = "http://127.0.0.1:8000"


def commands(example: str) -> list[list[str]]:
    """The indented lines of the README, as words."""
    text = (ROOT / "examples" / example / "README.md").read_text()
    return [shlex.split(line) for line in re.findall(r"^ {7}(\S.*)$", text, re.MULTILINE)]


def settings_of(words: list[str]) -> dict[str, Any]:
    """The options of `multiworld serve` as `LocalService` takes them."""
    return {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)
    }


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


def check_labels(module: nn.Module) -> Callable[[bytes, Path], None]:
    """Checks that the labels and probabilities are those of the module."""

    def check(answer: bytes, bundle: Path) -> None:
        manifest = read_bundle(bundle).manifest
        image = manifest.image
        assert image is not None
        photo = Path("examples/images/clock.jpg").read_bytes()
        pixels = image_tensor(photo, resize_size=image.resize_size, crop_size=image.crop_size, max_pixels=10**8)
        with torch.inference_mode():
            expected = module.eval()(Normalize(image.mean, image.std)(pixels[None])).softmax(1)[0]
        found = json.loads(answer)["predictions"]
        assert len(found) >= 3
        assert [each["label"] for each in found] == [
            manifest.labels[index] for index in expected.topk(len(found)).indices
        ]
        assert [each["probability"] for each in found] == pytest.approx(expected.topk(len(found)).values.tolist(), 1e-3)

    return check


def check_own_model(answer: bytes, bundle: Path) -> None:
    check_labels(classifier.make())(answer, bundle)


def check_fine_tuned(answer: bytes, bundle: Path) -> None:
    module = resnet18(num_classes=fine_tune.CLASSES)
    module.load_state_dict(torch.load("hues.pth"))
    check_labels(module)(answer, bundle)


def check_vision_transformer(answer: bytes, bundle: Path) -> None:
    check_labels(vit.make())(answer, bundle)


def check_text(answer: bytes, bundle: Path) -> None:
    (text,) = (words[5] for words in commands("text_classifier") if words[0] == "curl")
    ids = torch.tensor([tokens(text)])
    assert len(set(ids[0].tolist())) > 8
    with torch.inference_mode():
        (expected,) = text_model.make().eval()(ids, ids > 0).tolist()
    (found,) = json.loads(answer)
    assert list(found.values()) == pytest.approx(expected, rel=1e-3)


def check_segmentation(answer: bytes, bundle: Path) -> None:
    with Image.open("classes.png") as image:
        assert (image.size, image.mode) == ((SIZE, SIZE), "P")
        found = torch.from_numpy(np.array(image))
    with Image.open("examples/images/clock.jpg") as photo:
        body = io.BytesIO()
        photo.save(body, "PNG")
    pixels = torch.from_numpy(Handler().decode(body.getvalue(), "image/png")["input"])
    with torch.inference_mode():
        (expected,) = read_bundle(bundle).build(read_bundle(bundle).graph)(pixels)
    assert (found == expected[0].argmax(0)).float().mean() > 0.99  # two classes may be equally good


@pytest.mark.parametrize(
    ("example", "check"),
    [
        ("own_model", check_own_model),
        ("fine_tuned", check_fine_tuned),
        ("vision_transformer", check_vision_transformer),
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
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    *prepare, serve, ask = commands(example)
    for words in prepare:
        run(words, "", capsys)
    assert serve[:2] == ["multiworld", "serve"]
    settings = settings_of(serve[2:])
    with LocalService(**settings) as service:
        check(run(ask, service.url, capsys), Path(settings["model"]))
