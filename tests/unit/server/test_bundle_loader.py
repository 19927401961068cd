"""Serving bundles: partition, versions, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from multiworld_serving.common.service.predictor import ImageSizes
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.models.errors import BundleError, ModelError, WeightsError
from multiworld_serving.models.export.exporter import ExportSettings, export_model
from multiworld_serving.models.optimize.tuning import NO_TUNING
from multiworld_serving.server.leader.versions.model_source import ModelSource
from multiworld_serving.server.leader.versions.version_table import VersionPlan, VersionTable
from tests.bundles import CLASSES, SIZE, Classifier, classifier_bundle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bundles")
    classifier_bundle(made / "one")
    classifier_bundle(made / "two", seed=1, version="2")
    classifier_bundle(made / "same version", seed=1)
    classifier_bundle(made / "logits", version="3", labels=0)
    return made


def source(folder: Path, **changed: object) -> ModelSource:
    values: dict[str, object] = {"model": str(folder / "one"), "weights_dir": folder, "max_batch_size": 8}
    return ModelSource(LeaderSettings(**values | changed))  # type: ignore[arg-type]


def opened(folder: Path, **changed: object) -> tuple[ModelSource, VersionPlan]:
    loader = source(folder, **changed)
    return loader, loader.open(NO_TUNING)[1]


def test_served_model_is_described_by_the_manifest(folder: Path) -> None:
    served, plan = source(folder, stages=3).open(NO_TUNING)
    assert (served.name, served.version, served.image) == ("classifier", "1", ImageSizes(SIZE, SIZE))
    assert len(served.labels) == CLASSES
    assert [stage.spec.index for stage in plan.stages] == [0, 1, 2]
    assert plan.stages[0].spec.input_rows.dims == (3, SIZE, SIZE)


def test_version_of_the_same_interface_is_loaded(folder: Path) -> None:
    loader, plan = opened(folder)
    versions = VersionTable(plan)
    assert loader.load("one", versions) is plan
    assert loader.load(None, versions) is plan
    found = loader.load("two", versions)
    assert (found.version.name, found.version.number, len(found.stages)) == ("2", 2, 2)
    says = f"has the digest .*, but .* version 1 with the digest {plan.version.digest}; export"
    with pytest.raises(BundleError, match=says):
        loader.load("same version", versions)


def test_version_with_another_interface_or_of_another_model_is_refused_with_the_difference(folder: Path) -> None:
    options = ExportSettings("other", "2", ("images",), max_batch_size=8)
    export_model(Classifier(), [torch.rand(2, 3, SIZE, SIZE)], folder / "other", options)
    loader, plan = opened(folder)
    labels = r"classifier@3 has other labels than the service: labels label 0 and label 1.*the bundle has labels none"
    name = "the model 'other', but the service serves 'classifier'; export it with --name classifier"
    for version, says in {"logits": labels, "other": name}.items():
        with pytest.raises(BundleError, match=says):
            loader.load(version, VersionTable(plan))


@pytest.mark.parametrize("name", ["bundles/two", "random:1", "x" * 1000])
def test_missing_bundle_is_named_with_the_folder_when_a_version_is_loaded(folder: Path, name: str) -> None:
    loader, plan = opened(folder)
    with pytest.raises(BundleError, match=f"there is no bundle '{name[:64]}' in --weights-dir {folder};"):
        loader.load(name, VersionTable(plan))


@pytest.mark.parametrize("name", ["../two", "/etc/passwd", "missing", "two\0", "x" * 2000])
def test_only_bundles_below_the_folder_are_loaded(folder: Path, name: str) -> None:
    loader, plan = opened(folder, weights_dir=folder / "one")
    with pytest.raises(ModelError) as refused:
        loader.load(name, VersionTable(plan))
    assert "\n" not in str(refused.value)
    without, _ = opened(folder, weights_dir=None)
    with pytest.raises(WeightsError, match="--weights-dir"):
        without.load("two", VersionTable(plan))


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"max_batch_size": 16}, "at most 8"),
        ({"image_size": 32}, "--image-size"),
        ({"stages": 60}, "at most"),
    ],
)
def test_settings_that_do_not_fit_the_bundle_are_refused(folder: Path, changed: dict[str, object], what: str) -> None:
    with pytest.raises(ModelError, match=what):
        source(folder, **changed).open(NO_TUNING)


def test_bundle_without_a_proof_of_independent_rows_is_proven_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiworld_serving.models.export.exporter.check_independent_rows", lambda *_: None)
    mixing = nn.Sequential(Classifier(), nn.Softmax(0))
    for name, model in (("good", Classifier()), ("mixing", mixing)):
        options = ExportSettings("model", "1", ("images",), max_batch_size=8)
        export_model(model.eval(), [torch.rand(2, 3, SIZE, SIZE)], tmp_path / name, options)
        manifest = tmp_path / name / "manifest.json"
        fields = json.loads(manifest.read_text())
        assert fields.pop("independent_rows")
        manifest.write_text(json.dumps(fields))
    opened(tmp_path, model=str(tmp_path / "good"))
    with pytest.raises(ModelError, match=r"mixes the rows of a batch: aten\..*softmax"):
        opened(tmp_path, model=str(tmp_path / "mixing"))
    loader, plan = opened(tmp_path, model=str(tmp_path / "good"))
    with pytest.raises(ModelError, match="mixes the rows of a batch"):
        loader.load("mixing", VersionTable(plan))
