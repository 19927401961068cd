"""`multiworld export` writes a bundle of the user's model, binds its inputs by name, and says in one line what is wrong."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from multiworld_serving.cli.main import main
from multiworld_serving.models.bundle.files import read_bundle
from multiworld_serving.models.errors import ExportError
from multiworld_serving.models.export.sources import parse_dynamic, parse_input
from tests.refusals import refusal
from tests.unit.programs import exported_models

SPEC = "float32[batch,4]"


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(exported_models.__file__, "m.py")


def command(source: str, *options: str) -> list[str]:
    return ["export", source, "-o", "out", "--max-batch-size", "3", *options]


def inputs(*names: str) -> list[str]:
    return [part for name in names for part in ("--input", f"{name}:{SPEC}")]


def computed(*tensors: Tensor) -> Tensor:
    """What the exported bundle computes."""
    bundle = read_bundle(Path("out"))
    found: tuple[Tensor] = bundle.build(bundle.graph)(*tensors)
    return found[0]


def test_export_writes_a_bundle_with_labels_when_images_are_described(capsys: pytest.CaptureFixture[str]) -> None:
    Path("labels.txt").write_text("a\nb\nc\n")
    options = [
        "--image-size",
        "8",
        "--mean",
        "0",
        "0.5",
        "0",
        "--labels",
        "labels.txt",
        "--stages",
        "2",
        "--version",
        "7",
    ]
    assert main(["export", *options, "m.py:convolutions", "-o", "my flowers.zip", "--max-batch-size", "4"]) == 0
    printed = capsys.readouterr().out
    assert "at batch 1, 2, 4" in printed
    assert "mean (0.0, 0.5, 0.0), std (0.229, 0.224, 0.225)" in printed
    manifest = read_bundle(Path("my flowers.zip")).manifest
    assert (manifest.name, manifest.version, manifest.labels) == ("my_flowers", "7", ("a", "b", "c"))
    assert manifest.image is not None
    assert (manifest.image.crop_size, manifest.image.resize_size, manifest.image.mean) == (8, 9, (0, 0.5, 0))
    assert len(manifest.cuts) == 1


@pytest.mark.parametrize("inputs", [["--example", "m.py:images"], ["--input", "x:float32[batch,3,9,9]"]])
def test_export_shows_a_table_of_stages(inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["export", "m.py:convolutions", "-o", "v1.2.bundle", "--name", "x", "--max-batch-size", "2", *inputs]) == 0
    )
    printed = capsys.readouterr()
    assert "output KiB" in printed.out
    assert " FP32 [batch,3,9,9]\noutput output FP32 [batch,3]\n" in printed.out
    assert "capturing" in printed.err
    manifest = read_bundle(Path("v1.2.bundle")).manifest
    assert (manifest.name, manifest.inputs[0].shape) == ("x", ("batch", 3, 9, 9))


@pytest.mark.parametrize("model", ["compiled", "parallel", "distributed", "partly_compiled"])
def test_wrapper_is_removed(model: str) -> None:
    plain = exported_models.plain().eval()
    torch.save(plain.state_dict(), "plain.pt")
    assert main(command(f"m.py:{model}", "--weights", "plain.pt", *inputs("x"))) == 0
    x = torch.randn(3, 4)
    torch.testing.assert_close(computed(x), plain(x))


def test_elements_are_marked_as_the_message_says() -> None:
    assert main(command("m.py:Marking", *inputs("x"))) == 0
    x = torch.randn(3, 4)
    torch.testing.assert_close(computed(x), (2 * x).clamp_min(0))


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
    assert main(command(f"m.py:{model}", "--stages", "1", *options)) == 0
    bundle = read_bundle(Path("out"))
    assert [each.name for each in bundle.manifest.inputs] == names
    tensors = {name: torch.randn(3, 4) for name in names}
    torch.testing.assert_close(
        computed(*tensors.values()),
        _expected(model, bundle.weights(each.key for each in bundle.graph.weights), tensors),
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


def test_dimension_of_an_entry_is_variable() -> None:
    options = ["--example", "m.py:entries", "--dynamic", "batch.text:1,batch.mask:1=2..6"]
    assert main(command("m.py:Entries", *options)) == 0
    text, mask = torch.randn(3, 5), torch.randn(3, 5)
    torch.testing.assert_close(computed(mask, text), exported_models.Entries()({"text": text, "mask": mask}))


IMAGE = ["--image-size", "8"]
OPTIONAL = "forward has no parameter 'maks'; it takes x, mask (optional), bias (optional)"
STEPS = {"loading the model", "capturing the model"}


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("m.py:convolutions", [], "give --input"),
        ("m.py:missing", IMAGE, "has no function 'missing'"),
        ("m.py:text", IMAGE, "returned str; expected a torch.nn.Module"),
        ("m.py:broken", IMAGE, "ZeroDivisionError"),
        ("other.py:make", IMAGE, "does not exist"),
        ("no.such.module:make", IMAGE, "ModuleNotFoundError"),
        ("m.py:convolutions", ["--input", "x:float32[3,9]"], "expected NAME:DTYPE"),
        ("m.py:convolutions", ["--input", "x:float32[batch,3,9,9]", "--dynamic", "x=1"], "INPUT:DIMENSION=LEAST..MOST"),
        ("m.py:convolutions", ["--input", "x:float32[batch,7]"], "fails for x float32[2, 7]: RuntimeError"),
        ("m.py:convolutions", ["--input", "x:int64[batch,3,9,9]"], "check --input"),
        ("m.py:convolutions", ["--input", "x:int64[batch,3,9,9]", "--labels", "m.py"], "check --input"),
        (
            "m.py:Difference",
            ["--input", "before:int8[batch]", "--input", "after:int8[batch]", "--labels", "x"],
            "one input",
        ),
        ("m.py:Branching", ["--input", "x:float32[batch,7]"], "torch.where"),
        ("m.py", [], "give m.py:FUNCTION"),
        ("m.py:convolutions", ["--input", "x:int64[batch,3,9,9]", "--example", "m.py:images"], "exclude each other"),
        ("m.py:convolutions", [*IMAGE, "--example", "m.py:images"], "exclude each other"),
        ("m.py:convolutions", ["--mean", "1,2,3"], "give --image-size"),
        ("m.py:convolutions", [*IMAGE, "--weights", "none.pth"], "there is no file"),
        ("m.py:convolutions", [*IMAGE, "--labels", "m.py"], "labels"),
        ("m.py:convolutions", [*IMAGE, "--stages", "1000"], "at most"),
        ("m.py:convolutions", [*IMAGE, "-o", "m.py"], "exists"),
        (
            "m.py:scripted",
            inputs("x"),
            "the model is a TorchScript module, which torch.export cannot capture; export the nn.Module",
        ),
        ("m.py:partly_scripted", inputs("x"), "the model.2 is a TorchScript module"),
        ("m.py:Selecting", inputs("x"), ", in forward return y[y > 0]); keep all elements and mark some"),
        ("m.py:Optional", inputs("x", "maks"), OPTIONAL),
        ("m.py:Optional", ["--example", "m.py:unknown"], OPTIONAL),
        ("m.py:Optional", inputs("image"), "forward has no parameter 'image'; it takes x, mask (optional)"),
        ("m.py:Optional", inputs("bias"), "missing a required argument: 'x'; it takes x, mask (optional)"),
        ("m.py:Optional", ["--example", "m.py:numbers"], "the example of 'bias' is int; expected a tensor"),
        ("m.py:Optional", ["--example", "m.py:too_many"], "the example is tuple of 4; expected a tensor, a tuple"),
        ("m.py:PositionOnly", inputs("y"), "forward takes x by position: give these, too"),
        (
            "m.py:Variadic",
            inputs("x"),
            " names no parameter; write a module whose forward names",
        ),
        ("m.py:Entries", inputs("batch", "batch.mask"), "'batch' is either one tensor or a dict of tensors"),
        ("m.py:Entries", inputs("batch.mask", "batch"), "'batch' is either one tensor or a dict of tensors"),
        ("m.py:Difference", ["--example", "m.py:entries"], "no parameter 'mask'; it takes before, after"),
    ],
)
def test_export_is_refused_with_one_line_when_an_option_is_wrong(
    source: str, options: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    *steps, error = refusal(capfd, *command(source, *options))
    assert set(steps) <= STEPS
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
