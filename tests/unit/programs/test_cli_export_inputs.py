"""`multiworld export` binds inputs to the parameters of `forward` by name."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from multiworld_serving.cli.main import main
from multiworld_serving.models.bundle.files import read_bundle
from multiworld_serving.models.export.sources import call_function

MODELS = """
import torch
from torch import nn

class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, mask=None, bias=None):
        x = self.layer(x)
        if mask is not None:
            x = x * mask
        return x if bias is None else x + 10 * bias

class Difference(nn.Module):
    def forward(self, before, after):
        return after - 2 * before

class KeywordOnly(nn.Module):
    def forward(self, x, *, scale, offset=None):
        return x * scale if offset is None else x * scale + offset

class PositionOnly(nn.Module):
    def forward(self, x, y=None, /, z=None):
        return x - (0 if y is None else 2 * y) - (0 if z is None else 3 * z)

class Entries(nn.Module):
    def forward(self, batch, scale=None):
        found = batch["text"] - 3 * batch["mask"]
        return found if scale is None else found * scale

class Listed(nn.Module):
    def forward(self, pair):
        return pair[0] - 2 * pair[1]

class Variadic(nn.Module):
    def forward(self, *tensors, **options):
        return sum(tensors)

class One(nn.Module):
    def forward(self, x):
        return x + 1

def rows(seed):
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))

def skipped():
    return rows(0), None, rows(1)

def by_parameter():
    return {"bias": rows(1), "x": rows(0)}

def keywords():
    return {"x": rows(0), "scale": rows(1)}

def entries():
    return {"mask": rows(1), "text": rows(0)}

def entries_by_parameter():
    return {"scale": rows(2), "batch": {"text": rows(0), "mask": rows(1)}}

def listed():
    return {"pair": [rows(0), rows(1)]}

def unknown():
    return {"x": rows(0), "maks": rows(1)}

def numbers():
    return {"x": rows(0), "bias": 3}

def too_many():
    return rows(0), rows(1), rows(2), rows(3)
"""

SPEC = "float32[batch,4]"


@pytest.fixture
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(MODELS)


def export(model: str, *options: str) -> int:
    return main(["export", f"m.py:{model}", "-o", "out", "--max-batch-size", "3", "--stages", "1", *options])


def inputs(*names: str) -> list[str]:
    return [part for name in names for part in ("--input", f"{name}:{SPEC}")]


@pytest.mark.usefixtures("_models")
@pytest.mark.parametrize(
    ("model", "options", "names"),
    [
        ("Optional", inputs("x", "bias"), ["x", "bias"]),
        ("Optional", inputs("bias", "x"), ["bias", "x"]),
        ("Optional", inputs("x", "mask"), ["x", "mask"]),
        ("Optional", ["--example", "m.py:skipped"], ["x", "bias"]),
        ("Optional", ["--example", "m.py:by_parameter"], ["bias", "x"]),
        ("Difference", inputs("after", "before"), ["after", "before"]),
        ("KeywordOnly", inputs("x", "scale"), ["x", "scale"]),
        ("KeywordOnly", ["--example", "m.py:keywords"], ["x", "scale"]),
        ("PositionOnly", inputs("z", "x"), ["z", "x"]),
        ("PositionOnly", inputs("y", "x"), ["y", "x"]),
        ("Entries", inputs("batch.text", "batch.mask"), ["batch.text", "batch.mask"]),
        ("Entries", inputs("batch.text", "batch.mask", "scale"), ["batch.text", "batch.mask", "scale"]),
        ("Entries", ["--example", "m.py:entries"], ["batch.mask", "batch.text"]),
        ("Entries", ["--example", "m.py:entries_by_parameter"], ["scale", "batch.text", "batch.mask"]),
        ("Listed", ["--example", "m.py:listed"], ["pair.0", "pair.1"]),
        ("One", inputs("image"), ["image"]),
    ],
)
def test_bundle_computes_like_the_model_with_its_inputs_by_name(
    model: str, options: list[str], names: list[str]
) -> None:
    assert export(model, *options) == 0
    bundle = read_bundle(Path("out"))
    assert [each.name for each in bundle.manifest.inputs] == names
    tensors = {name: torch.randn(3, 4) for name in names}
    (found,) = bundle.build(bundle.graph)(*tensors.values())
    torch.testing.assert_close(
        found, _expected(model, bundle.weights(each.key for each in bundle.graph.weights), tensors)
    )


def _expected(model: str, weights: dict[str, Tensor], tensors: dict[str, Tensor]) -> Tensor:
    """What the model computes in eager mode. Written out here, so that nothing binds the inputs."""
    t = tensors
    match model:
        case "Optional":
            weight, bias = (next(w for key, w in weights.items() if key.endswith(end)) for end in ("weight", "bias"))
            return nn.functional.linear(t["x"], weight, bias) * t.get("mask", 1) + 10 * t.get("bias", torch.zeros(1))
        case "Difference":
            return t["after"] - 2 * t["before"]
        case "KeywordOnly":
            return t["x"] * t["scale"]
        case "PositionOnly":
            return t["x"] - 2 * t.get("y", torch.zeros(1)) - 3 * t.get("z", torch.zeros(1))
        case "Entries":
            return (t["batch.text"] - 3 * t["batch.mask"]) * t.get("scale", torch.ones(1))
        case "Listed":
            return t["pair.0"] - 2 * t["pair.1"]
    return t["image"] + 1


@pytest.mark.usefixtures("_models")
def test_dimension_of_an_entry_is_variable(tmp_path: Path) -> None:
    options = ["--example", "m.py:entries", "--dynamic", "batch.text:1,batch.mask:1=2..6"]
    assert export("Entries", *options) == 0
    bundle = read_bundle(Path("out"))
    text, mask = torch.randn(3, 5), torch.randn(3, 5)
    (found,) = bundle.build(bundle.graph)(mask, text)
    torch.testing.assert_close(found, call_function("m.py:Entries")({"text": text, "mask": mask}))


OPTIONAL = "forward has no parameter 'maks'; it takes x, mask (optional), bias (optional)"


@pytest.mark.usefixtures("_models")
@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("Optional", inputs("x", "maks"), OPTIONAL),
        ("Optional", ["--example", "m.py:unknown"], OPTIONAL),
        ("Optional", inputs("image"), "forward has no parameter 'image'; it takes x, mask (optional)"),
        ("Optional", inputs("bias"), "missing a required argument: 'x'; it takes x, mask (optional)"),
        ("Optional", ["--example", "m.py:numbers"], "the example of 'bias' is int; expected a tensor"),
        ("Optional", ["--example", "m.py:too_many"], "the example is tuple of 4; expected a tensor, a tuple"),
        ("PositionOnly", inputs("y"), "forward takes x by position: give these, too"),
        (
            "Variadic",
            inputs("x"),
            "forward(*tensors, **options) names no parameter; write a module whose forward names",
        ),
        ("Entries", inputs("batch", "batch.mask"), "'batch' is either one tensor or a dict of tensors"),
        ("Entries", inputs("batch.mask", "batch"), "'batch' is either one tensor or a dict of tensors"),
        ("Difference", ["--example", "m.py:entries"], "no parameter 'mask'; it takes before, after"),
    ],
)
def test_input_is_refused_with_the_parameters_when_the_model_does_not_take_it(
    model: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(model, *options) == 2
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith("multiworld: error:")
    assert message in error
    assert not Path("out").exists()
