"""Published weights from the cache and without a network. No test uses the network: the proxy leads to this process."""

import logging
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from multiworld_serving.models import MODEL_NAMES, WeightsError, load_model
from multiworld_serving.models.architectures import published_weights
from multiworld_serving.models.weights import pretrained
from multiworld_serving.models.weights.loading import LoadedModel
from multiworld_serving.models.weights.random_weights import random_model

V1 = published_weights("resnet18").IMAGENET1K_V1


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torch.hub's cache, empty."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
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
    torch.save(random_model("resnet18", seed=4).state_dict(), path)
    return path


def assert_from_cache(model: LoadedModel) -> None:
    expected = random_model("resnet18", seed=4).get_parameter("fc.weight")
    assert torch.equal(model.module.get_parameter("fc.weight"), expected)
    assert model.version == "IMAGENET1K_V1"
    assert model.labels[0] == "tench"


@pytest.mark.usefixtures("cached", "no_network")
@pytest.mark.parametrize("weights", ["IMAGENET1K_V1", "DEFAULT", "ResNet18_Weights.IMAGENET1K_V1", "auto"])
def test_published_weights_are_taken_from_the_cache(weights: str) -> None:
    assert_from_cache(load_model("resnet18", weights))


@pytest.mark.usefixtures("no_network")
def test_download_failure_says_what_to_do(cache: Path) -> None:
    with pytest.raises(WeightsError, match=r"cannot download .*--weights FILE.*--weights random:0") as caught:
        load_model("resnet18", "DEFAULT")
    assert str(cache) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert socket.getdefaulttimeout() is None


def test_stalled_download_times_out(listener: socket.socket, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(pretrained, "STALL_TIMEOUT_S", 0.1)
    use_proxy(monkeypatch, listener.getsockname()[1])
    with pytest.raises(WeightsError, match="cannot download"):
        load_model("resnet18", "IMAGENET1K_V1")
    assert not list(cache.glob("*.pth"))


def test_damaged_cache_file_is_named_in_the_error(cached: Path) -> None:
    cached.write_bytes(cached.read_bytes()[:1000])
    with pytest.raises(WeightsError, match=f"{re.escape(str(cached))}.*delete that file"):
        load_model("resnet18", "DEFAULT")


@pytest.mark.usefixtures("no_network")
def test_auto_falls_back_with_one_warning_when_offline(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        model = load_model("resnet18", "auto")
    assert model.version == "random:0"
    warning = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warning) == 1
    assert "NO TRAINED WEIGHTS" in warning[0]
    assert "cannot be downloaded: " in warning[0], "the proxy refuses at once"


def test_auto_falls_back_within_a_time_limit_when_the_host_is_silent(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pretrained, "PROBE_TIMEOUT_S", 0.1)
    use_proxy(monkeypatch, listener.getsockname()[1])
    start_s = time.monotonic()
    assert load_model("resnet18", "auto").version == "random:0"
    assert "does not answer within 0.1 s" in caplog.text
    assert time.monotonic() - start_s < 20  # torch.hub alone would wait forever


def test_auto_falls_back_when_the_cache_is_damaged(cached: Path, caplog: pytest.LogCaptureFixture) -> None:
    cached.write_bytes(b"")
    assert load_model("resnet18", "auto").version == "random:0"
    assert "delete that file" in caplog.text


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_published_file_is_recognized_by_its_content(name: str) -> None:
    for weights in published_weights(name):
        prefix = weights.url.rsplit("-", 1)[-1].removesuffix(".pth")
        assert pretrained.weights_with_content(name, prefix + "0" * 56) is weights
    assert pretrained.weights_with_content(name, "0" * 64) is None
