"""`multiworld export hf:FOLDER` writes a bundle that computes like the model of transformers, or says why it cannot."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForTokenClassification,
    MobileViTImageProcessor,
    RobertaConfig,
    RobertaModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from multiworld_serving.cli.main import main
from multiworld_serving.models.bundle.files import read_bundle
from multiworld_serving.models.errors import ModelError
from multiworld_serving.models.export.exporter import ExportSettings
from multiworld_serving.models.export.transformers_models import load_model
from multiworld_serving.models.preprocessing import Preprocessing
from tests.refusals import refusal

VOCABULARY, TOKENS, SIDE = 90, 12, 16
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {**SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": TOKENS}
NAMES = ("good", "bad", "other")
LABELS = {"id2label": dict(enumerate(NAMES))}
MEAN, STD = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)


def classifier(**options: Any) -> Any:
    return BertForSequenceClassification(BertConfig(**TEXT, **(LABELS | options)))


def tagger() -> Any:
    shape = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
    config = DistilBertConfig(vocab_size=VOCABULARY, max_position_embeddings=TOKENS, **shape, **LABELS)
    return DistilBertForTokenClassification(config)


def encoder() -> Any:
    """Its positions begin behind that of padding."""
    return RobertaModel(RobertaConfig(**(TEXT | {"max_position_embeddings": TOKENS + 2}), type_vocab_size=1))


def image_classifier() -> Any:
    return ViTForImageClassification(ViTConfig(**SMALL, image_size=SIDE, patch_size=8, **LABELS))


def processor() -> Any:
    return ViTImageProcessor(size={"height": SIDE, "width": SIDE}, image_mean=MEAN, image_std=STD)


def saved(model: Any, folder: Path, *others: Any) -> Path:
    """The model with random weights in this folder, as transformers stores it."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * 0.2)
    for each in (model, *others):
        each.save_pretrained(folder)
    return folder


def rewritten(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def loaded(folder: Path) -> tuple[nn.Module, dict[str, Tensor], ExportSettings]:
    return load_model(str(folder), ExportSettings("model", "1", ()))


def texts(rows: int, length: int, *names: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, length - 1 :] = 0
    ids, kinds = (torch.randint(most, (rows, length), generator=generator) for most in (VOCABULARY, 2))
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds}
    return {name: given[name] for name in ("input_ids", "attention_mask", *names)}


def exported(folder: Path, *options: str) -> tuple[Any, Callable[..., dict[str, Tensor]]]:
    """The manifest of the bundle, and what its stages compute in sequence."""
    path = folder.parent / "out.bundle"
    command = ["export", f"hf:{folder}", "-o", str(path), "--max-batch-size", "3", "--stages", "2", *options]
    assert main(command) == 0
    bundle = read_bundle(path)
    stages = [bundle.build(stage) for stage in bundle.stages]
    assert len(stages) == 2

    def compute(*values: Tensor) -> dict[str, Tensor]:
        for stage in stages:
            values = stage(*values)
        return dict(zip([each.name for each in bundle.manifest.outputs], values, strict=True))

    return bundle.manifest, compute


def described(tensors: Any) -> list[tuple[str, tuple[Any, ...]]]:
    return [(each.name, each.shape) for each in tensors]


@pytest.mark.parametrize(
    ("make", "further", "outputs"),
    [
        (classifier, ["token_type_ids"], {"probabilities": ("batch", 3)}),
        (tagger, [], {"probabilities": ("batch", "input_ids_1", 3)}),
        (encoder, [], {"last_hidden_state": ("batch", "input_ids_1", 16), "pooler_output": ("batch", 16)}),
    ],
)
def test_bundle_of_texts_computes_like_the_model(
    make: Callable[[], Any], further: list[str], outputs: dict[str, tuple[Any, ...]], tmp_path: Path
) -> None:
    folder = saved(make(), tmp_path / "model")
    manifest, compute = exported(folder)
    names = ["input_ids", "attention_mask", *further]
    assert described(manifest.inputs) == [(name, ("batch", "input_ids_1")) for name in names]
    assert described(manifest.outputs) == list(outputs.items())
    assert dict(manifest.dimensions) == {"batch": (1, 3), "input_ids_1": (1, TOKENS)}
    assert manifest.labels == (NAMES if "probabilities" in outputs else ())
    model = make().from_pretrained(folder)
    for rows, length in ((1, 1), (3, 5), (2, TOKENS)):
        given = texts(rows, length, *further)
        with torch.no_grad():
            expected = dict(model(**given))
            if manifest.labels:
                expected = {"probabilities": expected["logits"].softmax(-1)}
            found = compute(*given.values())
        torch.testing.assert_close(found, expected)


def test_bundle_of_images_computes_like_the_processor_and_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(image_classifier(), tmp_path / "model", processor())
    manifest, compute = exported(folder)
    assert described(manifest.inputs) == [("images", ("batch", 3, SIDE, SIDE))]
    assert (manifest.image, manifest.labels) == (Preprocessing(SIDE, SIDE, MEAN, STD), NAMES)
    assert f"images: shorter side resized to {SIDE}, center crop of {SIDE}" in capsys.readouterr().out
    images = torch.randint(256, (3, 3, SIDE, SIDE), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        pixels = processor()(list(images), return_tensors="pt")["pixel_values"]
        expected = ViTForImageClassification.from_pretrained(folder)(pixels).logits.softmax(-1)
        found = compute(images)["probabilities"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_number_of_tokens_is_that_of_the_option(tmp_path: Path) -> None:
    folder = saved(encoder(), tmp_path / "model")
    manifest, _ = exported(folder, "--dynamic", "input_ids:1,attention_mask:1=2..6")
    assert manifest.dimensions["input_ids_1"] == (2, 6)


@pytest.mark.parametrize(
    ("options", "function"),
    [
        ({"problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"problem_type": "regression"}, None),
        ({"id2label": {0: "score"}}, None),
    ],
)
def test_logits_become_probabilities_as_the_kind_of_classification_demands(
    options: dict[str, Any], function: Callable[[Tensor], Tensor] | None, tmp_path: Path
) -> None:
    model = classifier(**options).eval()
    module, example, settings = loaded(saved(model, tmp_path / "model"))
    logits = model(**example).logits
    expected = {"logits": logits} if function is None else {"probabilities": function(logits)}
    torch.testing.assert_close(module(*example.values()), expected)
    assert settings.labels == (() if function is None else NAMES)


def test_weights_of_half_precision_are_loaded_as_float32(tmp_path: Path) -> None:
    module, _, _ = loaded(saved(encoder().bfloat16(), tmp_path / "model"))
    assert {each.dtype for each in module.parameters()} == {torch.float32}


def test_output_without_trained_weights_is_left_out(tmp_path: Path) -> None:
    model = BertModel(BertConfig(**TEXT), add_pooling_layer=False)
    module, example, _ = loaded(saved(model, tmp_path / "model"))
    assert list(module(*example.values())) == ["last_hidden_state"]


@pytest.mark.parametrize(
    ("size", "options", "expected"),
    [
        ({"shortest_edge": 20}, {"crop_size": 16, "do_center_crop": True}, (20, 16)),
        ({"shortest_edge": 14}, {"crop_pct": 0.875}, (16, 14)),
        ({"shortest_edge": 384}, {"crop_pct": 0.875}, (384, 384)),
        ({"height": 20, "width": 20}, {"do_normalize": False}, (20, 20)),
    ],
)
def test_preprocessing_is_that_of_the_image_processor(
    size: dict[str, int], options: dict[str, Any], expected: tuple[int, int], tmp_path: Path
) -> None:
    kind = transformers.ConvNextImageProcessor if "crop_pct" in options else transformers.CLIPImageProcessor
    if "height" in size:
        kind = transformers.ViTImageProcessor
    image = loaded(saved(image_classifier(), tmp_path / "model", kind(size=size, **options)))[2].image
    assert image is not None
    assert (image.resize_size, image.crop_size) == expected
    assert (image.std == (1.0, 1.0, 1.0)) == ("do_normalize" in options)


STAGE = "or write it as a stage in Python (docs/models.md)"


def _without_weights(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    torch.save(classifier().state_dict(), folder / "pytorch_model.bin")
    return folder


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda folder: folder / "none", "cannot be loaded: "),
    "no model": (lambda folder: folder.parent, "expected a folder as save_pretrained writes it"),
    "no architecture": (
        lambda folder: rewritten(saved(classifier(), folder), architectures=None),
        "the architecture of FOLDER is none; expected one of transformers that ends with ForSequenceClassification, ",
    ),
    "generation": (
        lambda folder: rewritten(saved(classifier(), folder), architectures=["GPT2LMHeadModel"]),
        STAGE,
    ),
    "code of its own": (
        lambda folder: rewritten(saved(classifier(), folder), model_type="own", auto_map={"AutoConfig": "own.Config"}),
        "cannot be loaded",
    ),
    "boxes": (
        lambda folder: rewritten(saved(classifier(), folder), architectures=["LayoutLMForTokenClassification"]),
        f"takes bbox; expected a model with one text or image as its only input; {STAGE}",
    ),
    "sound": (
        lambda folder: rewritten(saved(classifier(), folder), architectures=["Wav2Vec2Model"]),
        "takes input_values, mask_time_indices; expected",
    ),
    "label that is missing": (
        lambda folder: rewritten(saved(classifier(), folder), id2label={"0": "a", "2": "b"}),
        "does not have the keys 0, 1, …; expected one label for each class",
    ),
    "layer without weights": (
        lambda folder: rewritten(saved(BertModel(BertConfig(**TEXT)), folder), architectures=["BertForMaskedLM"]),
        "lack 'cls.predictions",
    ),
    "pickled weights": (lambda folder: _without_weights(saved(classifier(), folder)), "model.safetensors"),
    "no image processor": (lambda folder: saved(image_classifier(), folder), "preprocessor_config.json"),
    "another order of colors": (
        lambda folder: saved(
            image_classifier(),
            folder,
            MobileViTImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        ),
        "MobileViTImageProcessor prepares images in another way than the service: expected to resize",
    ),
    "images that are not square": (
        lambda folder: saved(image_classifier(), folder, ViTImageProcessor(size={"height": 8, "width": SIDE})),
        f"and normalize; {STAGE}",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_model_is_refused_with_one_line(case: str, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    folder = make(tmp_path / "model")
    with pytest.raises(ModelError) as caught:
        loaded(folder)
    assert message.replace("FOLDER", str(folder)) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_option_is_refused_when_the_model_determines_it(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    *_, error = refusal(capfd, "export", "hf:model", "-o", str(tmp_path / "out"), "--image-size", "8")
    assert "--image-size does not apply to hf:model, which has its own weights, inputs and labels" in error


def test_extra_is_named_when_transformers_is_not_installed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    *_, error = refusal(capfd, "export", "hf:model", "-o", str(tmp_path / "out"))
    assert "needs transformers: pip install 'multiworld-serving[hf]'" in error
