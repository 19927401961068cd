"""Versions of a model of torchvision: which weights may be loaded, and what stays as in the first version."""

from pathlib import Path

import pytest
import safetensors.torch
import torchvision

from multiworld_serving.models import NO_TUNING, ModelError, WeightsError, load_model
from multiworld_serving.models.export.published import PublishedModel
from multiworld_serving.models.weights.random_weights import random_model
from multiworld_serving.server.leader_settings import LeaderSettings
from multiworld_serving.server.predictor import ImageSizes
from multiworld_serving.server.versions.bundle_loader import BundleLoader, open_model
from multiworld_serving.server.versions.version_table import VersionPlan, VersionTable

SIZE = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("weights")
    for name, classes in (("same (1).safetensors", 10), ("more.safetensors", 11)):
        safetensors.torch.save_file(random_model("resnet18", 5, classes).state_dict(), made / name)
    (made / "labels.txt").write_text("\n".join("abcdefghij"))
    return made


def opened(folder: Path, **changed: object) -> tuple[BundleLoader, VersionPlan]:
    values: dict[str, object] = {
        "model": "resnet18",
        "weights": str(folder / "same (1).safetensors"),
        "labels": str(folder / "labels.txt"),
        "image_size": SIZE,
        "weights_dir": folder,
    }
    served, loader, plan = open_model(LeaderSettings(**values | changed), NO_TUNING)  # type: ignore[arg-type]
    assert served.image == ImageSizes(SIZE, SIZE)
    assert served.labels == tuple("abcdefghij")
    assert [each.name for each in (*served.inputs, *served.outputs)] == ["input", "probabilities"]
    return loader, plan


def test_version_of_a_file_is_a_valid_name(folder: Path) -> None:
    _, plan = opened(folder)
    assert plan.version.name.startswith("same__1_-")
    assert load_model("resnet18", "random:7").version == "random:7"


def test_further_versions_have_the_same_stages(folder: Path) -> None:
    loader, plan = opened(folder, stages=3)
    versions = VersionTable(plan)
    assert loader.load(None, versions) is plan
    safetensors.torch.save_file(random_model("resnet18", 6, 10).state_dict(), folder / "next.safetensors")
    found = loader.load("next.safetensors", versions)
    assert found.version.number == 2
    assert [stage.spec.part for stage in found.stages] == [stage.spec.part for stage in plan.stages]
    assert [stage.weights.sha256 for stage in found.stages] != [stage.weights.sha256 for stage in plan.stages]


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        ("more.safetensors", "has 11 classes, but the service has 10"),
        ("random:1", "has 1000 classes, but the service has 10"),
        ("auto", "name the weights"),
        ("../more.safetensors", "--weights-dir"),
        ("missing.pth", "does not exist"),
        ("BEST", "unknown weights"),
    ],
)
def test_weights_that_do_not_fit_or_are_not_allowed_are_refused(folder: Path, weights: str, what: str) -> None:
    loader, plan = opened(folder)
    with pytest.raises(ModelError, match=what):
        loader.load(weights, VersionTable(plan))


def test_files_are_refused_without_a_folder(folder: Path) -> None:
    loader, plan = opened(folder, weights_dir=None)
    with pytest.raises(WeightsError, match="--weights-dir"):
        loader.load("more.safetensors", VersionTable(plan))


def test_other_models_of_torchvision_are_exported_and_have_versions(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    for name, classes in (("first", 10), ("second", 10), ("other", 7)):
        module = torchvision.models.get_model("squeezenet1_1", weights=None, num_classes=classes)
        safetensors.torch.save_file(module.state_dict(), folder / f"{name}.safetensors")
    given = {"model": "squeezenet1_1", "weights": str(folder / "first.safetensors"), "weights_dir": folder}
    settings = LeaderSettings(**given, labels=str(folder / "labels.txt"), image_size=SIZE, mean="0.5,0.5,0.5")  # type: ignore[arg-type]
    served, loader, plan = open_model(settings, NO_TUNING)
    assert (served.name, served.image, served.labels) == ("squeezenet1_1", ImageSizes(SIZE, SIZE), tuple("abcdefghij"))
    assert loader.first.manifest.image is not None
    assert loader.first.manifest.image.mean == (0.5, 0.5, 0.5)
    versions = VersionTable(plan)
    assert loader.load(None, versions) is plan
    assert loader.load("second.safetensors", versions).version.name.startswith("second-")
    with pytest.raises(WeightsError, match="has 7 classes, but the service has 10"):
        loader.load("other.safetensors", versions)
    with pytest.raises(ModelError, match="expected one of DEFAULT, IMAGENET1K_V1"):
        loader.load("BEST", versions)


@pytest.mark.parametrize(("name", "what"), [("squeezenet9", "did you mean"), ("raft_small", "does not take one image")])
def test_models_that_cannot_be_exported_by_name_are_refused(name: str, what: str) -> None:
    with pytest.raises(ModelError, match=what):
        PublishedModel.choose(name, "random:0")


def test_published_weights_determine_images_and_version() -> None:
    swag = PublishedModel.choose("vit_b_16", "IMAGENET1K_SWAG_E2E_V1")
    assert (swag.image.crop_size, swag.version) == (384, "IMAGENET1K_SWAG_E2E_V1")
    assert PublishedModel.choose("vit_b_16", "DEFAULT", image_size=64).image.resize_size == 64
    assert PublishedModel.choose("convnext_tiny", "random:3").version == "random-3"
