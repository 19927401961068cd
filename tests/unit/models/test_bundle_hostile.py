"""Hostile bundles are refused with one line: nothing of them is computed, and nothing is left behind."""

import copy
import hashlib
import json
import os
import pickle
import random
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from multiworld_serving.models.bundle.checking import check_graph
from multiworld_serving.models.bundle.files import read_bundle, write_bundle
from multiworld_serving.models.bundle.graph import Graph
from multiworld_serving.models.bundle.manifest import Manifest, TensorSpec
from multiworld_serving.models.errors import ModelError
from tests.unit.models.hostile_graphs import HOSTILE, attention, lstm, rows, sampler

LENGTHS = ({"batch": 1}, {"batch": 2}, {"batch": 8})


def checked(content: list[Any] | str) -> Graph:
    graph = Graph.from_json(content if isinstance(content, str) else json.dumps(content))
    check_graph(graph, LENGTHS)
    return graph


def outcome(read: Callable[[], object]) -> str | None:
    """Message of the refusal, which is one short line; None if it is accepted. Other exceptions fail the test."""
    try:
        read()
    except ModelError as error:
        message = str(error)
    else:
        return None
    assert message
    assert "\n" not in message
    assert len(message) < 800
    return message


@pytest.mark.parametrize("case", HOSTILE)
def test_graph_is_refused_with_one_line_when_it_is_hostile(case: str) -> None:
    assert outcome(lambda: checked(HOSTILE[case]))


@pytest.mark.parametrize("content", [lstm(), sampler(1), attention({}, heads=4), attention({"enable_gqa": True})])
def test_graph_is_accepted_when_the_arguments_of_its_kernels_are_valid(content: list[Any]) -> None:
    checked(content)


def computed_at_three_rows(operator: list[Any], shapes: dict[str, list[Any]]) -> list[Any]:
    """A graph in which `z` has another size than declared for 3 rows, a number that is not checked when the graph is read."""
    less = ["integer", "third", "eq", [{"value": "rows"}, 3]], ["integer", "removed", "mul", [{"value": "third"}, 3]]
    return [
        ["input", "x", "float32", ["batch", 4]],
        *(["weight", name, "float32", shape, name] for name, shape in shapes.items()),
        ["size", "rows", "batch"],
        *less,
        ["integer", "left", "sub", [4, {"value": "removed"}]],
        ["call", "z", "float32", ["batch", 4], "aten.slice.Tensor", [{"value": "x"}, 1, 0, {"value": "left"}], {}],
        *operator,
        ["call", "y", "float32", ["batch", 4], "aten.zeros_like.default", [{"value": "x"}], {}],
        ["output", ["y"]],
    ]


def test_batch_is_refused_when_its_length_was_not_checked_and_a_kernel_would_read_beyond_a_tensor() -> None:
    norm = [{"value": "z"}, *[{"value": "w"}] * 4, {"float": "0.1"}, {"float": "1e-05"}]
    operator = ["calls", "n", "aten._native_batch_norm_legit_no_training.default", norm, {}]
    graph = checked(computed_at_three_rows([operator], {"w": [4]}))
    module = graph.build({"w": torch.ones(4)}, torch.device("cpu"))
    module(torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"has the shape \[3, 1\]"):
        module(torch.ones(3, 4))


@pytest.mark.parametrize("divisor", [{"value": "x"}, -1])
@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_quotient_is_computed_when_a_client_sends_the_lowest_integer(divisor: Any, dtype: str) -> None:
    overload = "Tensor_mode" if isinstance(divisor, dict) else "Scalar_mode"
    division = [f"aten.div.{overload}", [{"value": "v"}, divisor], {"rounding_mode": "trunc"}]
    values = [["input", name, dtype, ["batch", 40]] for name in ("x", "v")]
    graph = checked([*values, ["call", "y", dtype, ["batch", 40], *division], ["output", ["y"]]])
    lowest = torch.iinfo(getattr(torch, dtype)).min
    x, v = (torch.full((1, 40), value, dtype=getattr(torch, dtype)) for value in (-1, lowest))
    (found,) = graph.build({}, torch.device("cpu"))(x, v)
    assert found.eq(lowest).all()
    (found,) = graph.build({}, torch.device("cpu"))(x, torch.full_like(v, 7))
    assert found.eq(-7).all()


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "null", "3", '"x"', "[" * 1_000_000, "[" * 900 + "]" * 900, "[1e999, NaN]", "\ud800"]
)
def test_graph_is_refused_when_the_text_is_not_rows(text: str) -> None:
    assert outcome(lambda: checked(text))


def damaged(document: Any, values: Sequence[Any], chance: random.Random) -> Any:
    """A copy in which one or two parts, at any depth, are replaced by one of these values."""
    made = copy.deepcopy(document)
    for _ in range(chance.randint(1, 2)):
        place: Any = made
        while isinstance(place, list | dict) and place:
            key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if chance.random() < 0.4 or not isinstance(place[key], list | dict):
                place[key] = copy.deepcopy(chance.choice(values))
                break
            place = place[key]
    return made


def test_graph_is_refused_or_computes_finite_shapes_when_parts_of_it_are_replaced() -> None:
    """Fuzzed rows raise ModelError and nothing else."""
    chance = random.Random(7)
    other: list[Any] = [None, True, -1, 0, 1 << 62, 1 << 63, 0.5, "", "x", "batch", "aten.relu.default", [], [[]], {}]
    other += [{"value": "y"}, {"value": "rows"}, {"dtype": "int64"}, {"device": None}, ["output", ["x"]], [1] * 50]
    fuzzed = [damaged(rows(), other, chance) for _ in range(300)]
    assert sum(outcome(partial(checked, each)) is not None for each in fuzzed) > 200


# -- files -------------------------------------------------------------------------------------------------------------------------


FILES = ("manifest.json", "graph.json", "weights.safetensors", "self_test.safetensors")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that is valid."""
    folder = tmp_path_factory.mktemp("original") / "bundle"
    graph = Graph.from_json(json.dumps(rows()))
    manifest = Manifest(
        name="tiny",
        version="1",
        dimensions={"batch": (1, 8)},
        cuts=(8,),
        image=None,
        labels=(),
        inputs=(TensorSpec("x", "float32", ("batch", 4, 6, 6)),),
        outputs=(TensorSpec("p", "float32", ("batch", 144)),),
        costs_s=(1.0,) * len(graph.nodes),
        made_with="a test",
        sha256={},
    )
    weights = {name: torch.rand(4) + 0.5 for name in ("scale", "shift", "mean", "var")}
    x = torch.randn(1, 4, 6, 6)
    values, tests = (x,), {"input.x": x}
    for number, stage in enumerate(graph.cut((8,))):
        values = stage.build(weights, torch.device("cpu"))(*values)
        tests |= {f"boundary.{number}.{index}": value for index, value in enumerate(values)}
    write_bundle(folder, manifest, graph, weights, tests)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that the test damages."""
    return Path(shutil.copytree(original, tmp_path / "bundle"))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def sign(folder: Path) -> None:
    """Write the digests of the files into the manifest."""
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES[1:]}
    rewrite(folder, lambda manifest: manifest.update(sha256=digests))


def refused(path: Path) -> str:
    """Message of the refusal. Nothing is left in the folder for temporary files."""
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", scratch)
        message = outcome(lambda: read_bundle(path))
        assert not list(Path(scratch).iterdir())
    assert message is not None, "it was accepted"
    return message


def pack(folder: Path, target: Path, compression: int = zipfile.ZIP_STORED, extra: str = "") -> Path:
    with zipfile.ZipFile(target, "w", compression) as archive:
        for name in FILES:
            archive.write(folder / name, name)
        if extra:
            archive.writestr(extra, b"{}")
    return target


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_bundle_is_read_when_it_is_valid(folder: Path, tmp_path: Path, compression: int) -> None:
    for path in (folder, pack(folder, tmp_path / "bundle.zip", compression=compression)):
        bundle = read_bundle(path)
        values = (bundle.self_test["input.x"],)
        for number, stage in enumerate(bundle.stages):
            values = bundle.build(stage)(*values)
            assert torch.equal(values[0], bundle.self_test[f"boundary.{number}.0"])


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "another format": lambda m: m.update(format=3),
    "unknown field": lambda m: m.update(code="import os"),
    "no batch": lambda m: m.update(dimensions={}),
    "another input": lambda m: m["inputs"][0].update(name="z"),
    "another element type": lambda m: m["inputs"][0].update(dtype="int64"),
    "output with line breaks": lambda m: m["outputs"][0].update(name="a\nb"),
    "output with escapes": lambda m: m["outputs"][0].update(name="\x1b[2J"),
    "output with a long name": lambda m: m["outputs"][0].update(name="a" * 201),
    "too many inputs": lambda m: m.update(inputs=m["inputs"] * 10_000),
    "cut outside": lambda m: m.update(cuts=[5000]),
    "cut between a call and its items": lambda m: m.update(cuts=[7]),
    "cost that is not a number": lambda m: m["costs_s"].__setitem__(0, float("nan")),
    "image preprocessing of another input": lambda m: m.update(
        image={"resize_size": 6, "crop_size": 6, "mean": [0, 0, 0], "std": [1, 1, 1]}
    ),
    "std of 0": lambda m: m.update(image={"resize_size": 6, "crop_size": 6, "mean": [0, 0, 0], "std": [0, 0, 0]}),
    "too few labels": lambda m: m.update(labels=["a", "b"]),
    "digest of another file": lambda m: m["sha256"].update({"graph.json": "0" * 64}),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_bundle_is_refused_when_its_manifest_is_hostile(folder: Path, case: str) -> None:
    rewrite(folder, MANIFESTS[case])
    refused(folder)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 1_000_000, '{"format": 1}', "\x00" * 100])
def test_bundle_is_refused_when_its_manifest_is_not_an_object(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    refused(folder)


def test_bundle_is_refused_when_the_manifest_is_fuzzed(folder: Path) -> None:
    chance = random.Random(3)
    text = (folder / "manifest.json").read_bytes()
    for _ in range(150):
        fuzzed = bytearray(text)
        for _ in range(chance.randint(1, 4)):
            fuzzed[chance.randrange(len(fuzzed))] = chance.randrange(256)
        (folder / "manifest.json").write_bytes(fuzzed)
        outcome(lambda: read_bundle(folder))  # a change of a cost or of the text about the programs is harmless


@pytest.mark.parametrize("name", FILES)
def test_bundle_is_refused_when_a_file_is_missing_linked_or_damaged(folder: Path, name: str) -> None:
    file, away = folder / name, folder.parent / "away"
    file.rename(away)
    assert name in refused(folder)
    file.symlink_to(away)
    assert name in refused(folder)
    file.unlink()
    file.mkdir()
    assert name in refused(folder)
    file.rmdir()
    os.mkfifo(file)
    assert name in refused(folder)
    file.unlink()
    content = bytearray(away.read_bytes())
    file.write_bytes(content[: len(content) // 2])
    refused(folder)
    content[10] ^= 1
    file.write_bytes(content)
    refused(folder)
    assert "neither a folder nor a .zip" in refused(away)


WEIGHTS: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "NaN": lambda w: w["mean"].__setitem__(2, float("nan")),
    "another element type": lambda w: w.update(mean=w["mean"].half()),
    "another shape": lambda w: w.update(mean=w["mean"][:1].clone()),
    "missing": lambda w: w.pop("mean"),
    "far more than the graph needs": lambda w: w.update(more=torch.zeros(120 << 20, dtype=torch.uint8)),
}
SELF_TESTS: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "NaN": lambda w: w["input.x"].fill_(float("nan")),
    "no input": lambda w: w.pop("input.x"),
    "no output": lambda w: w.pop("boundary.1.0"),
    "another shape": lambda w: w.update({"boundary.0.0": torch.zeros(1)}),
    "another element type": lambda w: w.update({"input.x": w["input.x"].double()}),
}


@pytest.mark.parametrize(
    ("name", "case"), [*((FILES[2], case) for case in WEIGHTS), *((FILES[3], case) for case in SELF_TESTS)]
)
def test_bundle_is_refused_when_its_weights_or_its_self_test_are_hostile(folder: Path, name: str, case: str) -> None:
    tensors = load_file(folder / name)
    (WEIGHTS if name == FILES[2] else SELF_TESTS)[case](tensors)
    save_file(tensors, folder / name)
    sign(folder)
    refused(folder)


@pytest.mark.parametrize("name", FILES[2:])
@pytest.mark.parametrize("content", [b"", b"\xff" * 64, pickle.dumps(print), struct.pack("<Q", 90 << 20) + b"{" * 100])
def test_bundle_is_refused_when_its_tensors_are_not_safetensors(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    sign(folder)
    refused(folder)


def test_bundle_is_refused_when_its_graph_is_hostile(folder: Path) -> None:
    (folder / "graph.json").write_text(json.dumps(HOSTILE["shapes: wrong shape"]))
    sign(folder)
    refused(folder)


@pytest.mark.parametrize(
    "name",
    ["../escaped", "/tmp/escaped", "a/../../escaped", "C:\\escaped", "more.json", "manifest.json/x", "weights.pkl"],
)
def test_zip_is_refused_when_it_has_other_names(folder: Path, tmp_path: Path, name: str) -> None:
    refused(pack(folder, tmp_path / "bundle.zip", extra=name))
    assert not list(tmp_path.rglob("escaped"))


def test_zip_is_refused_when_a_name_is_there_twice(folder: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate name"):
        path = pack(folder, tmp_path / "bundle.zip", extra="manifest.json")
    refused(path)


@pytest.mark.parametrize("name", FILES[:2])
def test_zip_is_refused_when_a_file_is_a_bomb(folder: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "bundle.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for other in FILES:
            if other == name:
                archive.writestr(name, b" " * (200 << 20))
            else:
                archive.write(folder / other, other)
    refused(path)


@pytest.mark.parametrize("offset", [8, 10])  # flags (bit 0: encrypted) and compression method in the central directory
def test_zip_is_refused_when_an_entry_cannot_be_unpacked(folder: Path, tmp_path: Path, offset: int) -> None:
    content = bytearray(pack(folder, tmp_path / "whole.zip").read_bytes())
    entry = content.index(b"PK\x01\x02")
    content[entry + offset] |= 1
    path = tmp_path / "bundle.zip"
    path.write_bytes(content)
    refused(path)


def test_zip_is_refused_when_it_is_damaged_anywhere(folder: Path, tmp_path: Path) -> None:
    chance = random.Random(5)
    whole = pack(folder, tmp_path / "whole.zip", compression=zipfile.ZIP_DEFLATED).read_bytes()
    path = tmp_path / "bundle.zip"
    for _ in range(100):
        fuzzed = bytearray(whole)
        for _ in range(8):
            fuzzed[chance.randrange(len(fuzzed))] ^= 1 << chance.randrange(8)
        path.write_bytes(fuzzed if chance.random() < 0.8 else fuzzed[: chance.randrange(len(fuzzed))])
        outcome(lambda: read_bundle(path))  # changes of times and permissions are harmless
