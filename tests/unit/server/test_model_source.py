"""Models of torchvision are exported into a cache; which weights may be loaded as further versions."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torchvision

from multiworld_serving.common.service.model_files import available_weights
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.models.bundle.files import read_bundle
from multiworld_serving.models.errors import ModelError
from multiworld_serving.models.optimize.tuning import NO_TUNING
from multiworld_serving.server.leader.versions.model_source import ModelSource
from multiworld_serving.server.leader.versions.version_table import VersionPlan, VersionTable

MODEL = "squeezenet1_1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("weights")
    for number, name in enumerate(("same (1)", "next")):
        torch.manual_seed(number)
        module = torchvision.models.get_model(MODEL, weights=None, num_classes=10)
        safetensors.torch.save_file(module.state_dict(), made / f"{name}.safetensors")
    return made


@pytest.fixture(scope="module", autouse=True)
def _cache(folder: Path) -> object:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield


@pytest.fixture(scope="module")
def opened(folder: Path) -> tuple[ModelSource, VersionPlan]:
    """A service of three stages with the first of these weights."""
    weights = str(folder / "same (1).safetensors")
    loader = ModelSource(LeaderSettings(model=MODEL, weights=weights, weights_dir=folder, image_size=64, stages=3))
    served, plan = loader.open(NO_TUNING)
    assert [each.name for each in (*served.inputs, *served.outputs)] == ["input", "probabilities"]
    return loader, plan


def test_further_versions_have_the_same_stages(opened: tuple[ModelSource, VersionPlan]) -> None:
    loader, plan = opened
    assert plan.version.name.startswith("same__1_-")
    versions = VersionTable(plan)
    assert loader.load(None, versions) is plan
    found = loader.load("next.safetensors", versions)
    assert (found.version.number, found.version.name.partition("-")[0]) == (2, "next")
    assert [stage.spec.input_rows for stage in found.stages] == [stage.spec.input_rows for stage in plan.stages]
    assert [stage.weights.sha256 for stage in found.stages] != [stage.weights.sha256 for stage in plan.stages]


def test_weights_that_are_damaged_or_not_allowed_are_refused(
    folder: Path, opened: tuple[ModelSource, VersionPlan]
) -> None:
    (folder / "link.safetensors").symlink_to("/etc/hostname")
    (folder / "torn.safetensors").write_bytes((folder / "next.safetensors").read_bytes()[:100_000])
    loader, plan = opened
    for weights, what in (
        ("auto", "name the weights"),
        ("../next.safetensors", "--weights-dir"),
        ("link.safetensors", "not below"),
        ("a\0b.pth", "invalid path"),
        ("torn.safetensors", "not a whole safetensors file"),
        ("missing.pth", "cannot read weights"),
        ("BEST", "has no weights 'BEST'; expected one of DEFAULT"),
        ("random:no", "seed"),
    ):
        with pytest.raises(ModelError, match=what):
            loader.load(weights, VersionTable(plan))


EXPORT = f"""
import logging, sys
from multiworld_serving.models.export.bundle_cache import exported
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
print(exported({MODEL!r}, "random:5", image_size=64), flush=True)
"""


def export(cache: Path) -> subprocess.Popen[str]:
    command, environment = [sys.executable, "-c", EXPORT], os.environ | {"XDG_CACHE_HOME": str(cache)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_processes_export_once_after_one_was_killed(tmp_path: Path) -> None:
    with export(tmp_path) as killed:
        assert killed.stdout is not None
        assert any("writing the bundle" in line for line in killed.stdout)
        os.killpg(killed.pid, signal.SIGKILL)
    for whole in tmp_path.glob(f"multiworld/bundles/{MODEL}*"):  # the export was faster than the signal
        read_bundle(whole)
        shutil.rmtree(whole)
    runs = [export(tmp_path) for _ in range(2)]
    printed = [run.communicate()[0] for run in runs]
    assert sorted("capturing" in text for text in printed) == [False, True]
    (path,) = {Path(text.splitlines()[-1]) for text in printed}
    assert read_bundle(path).manifest.version == "random:5"
    assert not list(tmp_path.glob(f"multiworld/bundles/.{MODEL}*"))


def test_model_that_takes_other_inputs_than_one_image_is_refused() -> None:
    with pytest.raises(ModelError, match="does not take one image"):
        available_weights(LeaderSettings(model="raft_small", weights="random:0"))
