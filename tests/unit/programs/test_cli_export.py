"""`multiworld export` writes a bundle of the user's model, and says in one line what is wrong."""

from pathlib import Path

import pytest
import torch

from multiworld_serving.cli.main import main
from multiworld_serving.models.bundle.files import read_bundle
from multiworld_serving.models.errors import ExportError
from multiworld_serving.models.export.sources import parse_dynamic, parse_input

MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))

def example():
    return torch.randn(2, 3, 9, 9)

def text():
    return "no module"

def broken():
    return 1 // 0

class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

def branching():
    return Branching()

class Two(nn.Module):
    def forward(self, x, y):
        return x + y
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    return "model.py"


def test_export_writes_a_bundle_with_labels_when_images_are_described(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("labels.txt").write_text("a\nb\nc\n")
    options = ["--image-size", "8", "--labels", "labels.txt", "--stages", "2", "--version", "7"]
    assert main(["export", f"{model}:make", "-o", "my flowers.zip", "--max-batch-size", "4", *options]) == 0
    assert "at batch 1, 2, 4" in capsys.readouterr().out
    manifest = read_bundle(Path("my flowers.zip")).manifest
    assert (manifest.name, manifest.version, manifest.labels) == ("my_flowers", "7", ("a", "b", "c"))
    assert manifest.image is not None
    assert (manifest.image.crop_size, manifest.image.resize_size) == (8, 9)
    assert len(manifest.cuts) == 1


@pytest.mark.parametrize("inputs", [["--example", "model.py:example"], ["--input", "x:float32[batch,3,9,9]"]])
def test_export_shows_a_table_of_stages(model: str, inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", f"{model}:make", "-o", "v1.2.bundle", "--name", "x", "--max-batch-size", "2", *inputs]) == 0
    printed = capsys.readouterr()
    assert "output KiB" in printed.out
    assert " FP32 [batch,3,9,9]\noutput output FP32 [batch,3]\n" in printed.out
    assert "capturing" in printed.err
    manifest = read_bundle(Path("v1.2.bundle")).manifest
    assert (manifest.name, manifest.inputs[0].shape) == ("x", ("batch", 3, 9, 9))


IMAGE = ["--image-size", "8"]
STEPS = {"loading the model", "capturing the model"}


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("model.py:make", [], "give --input"),
        ("model.py:missing", IMAGE, "has no function 'missing'"),
        ("model.py:text", IMAGE, "returned str; expected a torch.nn.Module"),
        ("model.py:broken", IMAGE, "ZeroDivisionError"),
        ("other.py:make", IMAGE, "does not exist"),
        ("no.such.module:make", IMAGE, "ModuleNotFoundError"),
        ("model.py:make", ["--input", "x:float32[3,9]"], "expected NAME:DTYPE"),
        ("model.py:make", ["--input", "x:float32[batch,3,9,9]", "--dynamic", "x=1"], "INPUT:DIMENSION=LEAST..MOST"),
        ("model.py:make", ["--input", "x:float32[batch,7]"], "fails for x float32[2, 7]: RuntimeError"),
        ("model.py:make", ["--input", "x:int64[batch,3,9,9]"], "check --input"),
        ("model.py:make", ["--input", "x:int64[batch,3,9,9]", "--labels", "model.py"], "check --input"),
        ("model.py:Two", ["--input", "x:int8[batch]", "--input", "y:int8[batch]", "--labels", "x"], "one input"),
        ("model.py:branching", ["--input", "x:float32[batch,7]"], "torch.where"),
        ("model.py", [], "give model.py:FUNCTION"),
        ("model.py:make", ["--input", "x:int64[batch,3,9,9]", "--example", "model.py:example"], "exclude each other"),
        ("model.py:make", [*IMAGE, "--example", "model.py:example"], "exclude each other"),
        ("model.py:make", ["--mean", "1,2,3"], "give --image-size"),
        ("model.py:make", [*IMAGE, "--weights", "none.pth"], "there is no file"),
        ("model.py:make", [*IMAGE, "--labels", "model.py"], "labels"),
        ("model.py:make", [*IMAGE, "--stages", "1000"], "at most"),
        ("model.py:make", [*IMAGE, "-o", "model.py"], "exists"),
    ],
)
def test_export_is_refused_with_one_line_when_an_option_is_wrong(
    model: str, source: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", source.replace("model.py", model), "-o", "out", "--max-batch-size", "2", *options]) == 2
    *steps, error = capsys.readouterr().err.splitlines()
    assert set(steps) <= STEPS
    assert error.startswith("multiworld: error:")
    assert message in error
    assert not Path("out").exists()


def test_input_and_dimensions_are_parsed() -> None:
    name, example = parse_input("ids:int64[batch, 12]")
    assert (name, example.dtype, example.shape) == ("ids", torch.int64, (2, 12))
    dynamic = parse_dynamic("ids:1,mask:1=1..512")
    assert (dynamic.places, dynamic.least, dynamic.most, dynamic.name) == ((("ids", 1), ("mask", 1)), 1, 512, "ids_1")


@pytest.mark.parametrize("text", ["ids=1..2", "ids:0=1..2", "ids:1=2..1", "ids:1=0..4", "ids:1,=1..2", "ids:1=1..", ""])
def test_dimension_is_refused_when_it_is_malformed(text: str) -> None:
    with pytest.raises(ExportError, match=r"LEAST\.\.MOST"):
        parse_dynamic(text)
