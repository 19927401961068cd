"""Published weights from the cache and without a network. No test uses the network: the proxy leads to this process."""

import logging
import os
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torchvision.models import ResNet18_Weights

from multiworld_serving.models.bundle.files import read_bundle
from multiworld_serving.models.cache_folder import cache_folder
from multiworld_serving.models.errors import ExportError, WeightsError
from multiworld_serving.models.export import bundle_cache, torchvision_models
from multiworld_serving.models.export.bundle_cache import exported
from multiworld_serving.models.export.torchvision_models import load_model

V1 = ResNet18_Weights.IMAGENET1K_V1


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torch.hub's cache, empty."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "bundles"))
    return tmp_path / "hub" / "checkpoints"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A proxy that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def use_proxy(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setattr(urllib.request, "_opener", None)  # urllib caches the proxies of its first use


@pytest.fixture
def no_network(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection is refused."""
    port = listener.getsockname()[1]
    listener.close()
    use_proxy(monkeypatch, port)


@pytest.fixture
def cached(cache: Path) -> Path:
    """Weights in the cache under the published file's name."""
    cache.mkdir(parents=True)
    path: Path = cache / V1.url.rsplit("/", 1)[-1]
    torch.save(load_model("resnet18", "random:4").module.state_dict(), path)
    return path


@pytest.mark.usefixtures("cached", "no_network")
@pytest.mark.parametrize("weights", ["IMAGENET1K_V1", "DEFAULT", "ResNet18_Weights.IMAGENET1K_V1"])
def test_published_weights_are_taken_from_the_cache(weights: str) -> None:
    model = load_model("resnet18", weights)
    expected = load_model("resnet18", "random:4").module.get_parameter("fc.weight")
    assert torch.equal(model.module.get_parameter("fc.weight"), expected)
    assert model.version == "IMAGENET1K_V1"
    assert model.labels[0] == "tench"


@pytest.mark.usefixtures("no_network")
def test_download_failure_says_what_to_do(cache: Path) -> None:
    with pytest.raises(WeightsError, match=r"cannot download .*--weights FILE.*--weights random:0") as caught:
        load_model("resnet18", "DEFAULT")
    assert str(cache) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert socket.getdefaulttimeout() is None


def test_stalled_download_times_out(listener: socket.socket, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(torchvision_models, "_STALL_TIMEOUT_S", 0.1)
    use_proxy(monkeypatch, listener.getsockname()[1])
    with pytest.raises(WeightsError, match="cannot download"):
        load_model("resnet18", "IMAGENET1K_V1")
    assert not list(cache.glob("*.pth"))


def test_damaged_cache_file_is_named_in_the_error(cached: Path) -> None:
    cached.write_bytes(cached.read_bytes()[:1000])
    with pytest.raises(WeightsError, match=f"{re.escape(str(cached))}.*delete that file"):
        load_model("resnet18", "DEFAULT")


@pytest.mark.usefixtures("no_network")
def test_auto_falls_back_with_one_warning_when_offline_and_exports_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with caplog.at_level(logging.INFO):
        path = exported("squeezenet1_1", "auto", image_size=64)
    assert path.is_relative_to(tmp_path / "bundles")
    assert read_bundle(path).manifest.version == "random:0"
    assert "exporting squeezenet1_1: capturing the model" in caplog.text
    warning = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warning) == 1
    assert "NO TRAINED WEIGHTS" in warning[0]
    assert "cannot be reached: " in warning[0], "the proxy refuses at once"
    monkeypatch.setattr(bundle_cache, "_export_in_child", None)
    assert exported("squeezenet1_1", "auto", image_size=64) == path, "the next start begins no export"


def test_auto_does_not_wait_for_a_silent_host(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_cache, "_PROBE_TIMEOUT_S", 0.1)
    use_proxy(monkeypatch, listener.getsockname()[1])
    reason = bundle_cache._why_unreachable()
    assert reason is not None
    assert "timed out" in reason


@pytest.mark.parametrize("planted", ["link", "writable"])
def test_cache_is_refused_when_another_user_could_have_made_it(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder, target = tmp_path / f"multiworld-{os.geteuid()}", tmp_path / "target"
    target.mkdir()
    if planted == "link":
        folder.symlink_to(target)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(ExportError, match="only this user can change"):
        exported("resnet18", "random:0")
    assert not list(target.iterdir())


def test_cache_has_mode_0700_without_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = cache_folder("bundles").parent
    assert folder.stat().st_mode & 0o777 == 0o700
