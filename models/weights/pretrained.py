"""Weights that torchvision publishes: looked up by name, and loaded from torch.hub's cache or downloaded into it."""

import contextlib
import logging
import re
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multiworld_serving.models.architectures import published_weights
from multiworld_serving.models.errors import WeightsError
from multiworld_serving.models.weights.checkpoints import clean_state_dict

logger = logging.getLogger(__name__)

UNTRAINED = "random:0"
"""What "auto" uses if there are no trained weights."""
PROBE_TIMEOUT_S = 3.0
"""How long "auto" waits for the download host, including DNS."""
STALL_TIMEOUT_S = 30.0
"""A download without progress for this long is aborted."""
_HASH_IN_URL = re.compile(r"-([0-9a-f]{8,})\.pth$")  # torch.hub's convention


def weights_named(model: str, weights: str) -> Any | None:
    """The `WeightsEnum` member of that name ("IMAGENET1K_V1", "DEFAULT", "ResNet50_Weights.IMAGENET1K_V2"), or None."""
    enum = published_weights(model)
    return enum.__members__.get(weights.removeprefix(f"{enum.__name__}."))


def weight_names(model: str) -> Sequence[str]:
    """Names of torchvision's published weights of this model, including "DEFAULT"."""
    return list(published_weights(model).__members__)


def weights_with_content(model: str, sha256: str) -> Any | None:
    """The published weights whose file has this hash, whatever its name, or None."""
    for weights in published_weights(model):
        match = _HASH_IN_URL.search(weights.url)
        if match is not None and sha256.startswith(match.group(1)):
            return weights
    return None


def cached_file(weights: Any) -> Path:
    """The path of these weights in torch.hub's cache, whether or not it exists."""
    name: str = weights.url.rsplit("/", 1)[-1]
    return Path(torch.hub.get_dir()) / "checkpoints" / name


def is_reachable(weights: Any) -> bool:
    """Whether the weights are in the cache or their host answers within `PROBE_TIMEOUT_S`."""
    return cached_file(weights).exists() or _host_answers(weights.url)


def warn_untrained(model: str, reason: str) -> None:
    """Log that "auto" uses random weights for this model, and why."""
    logger.warning(
        "NO TRAINED WEIGHTS: %s is served with %s, so its predictions are meaningless (%s). Pass --weights FILE for real ones.",
        model,
        UNTRAINED,
        reason,
    )


def fetch(weights: Any) -> dict[str, Tensor]:
    """The tensors of published weights, downloaded if they are not in the cache. The hash of a download is checked.

    Raises:
        WeightsError: the download failed or stalled, or the cached file is damaged; the message says what to do.
    """
    file = cached_file(weights)
    try:
        with _stall_timeout(), contextlib.redirect_stdout(sys.stderr):  # "Downloading: ..." is not the program's output
            state = weights.get_state_dict(progress=True, check_hash=True, weights_only=True)
    except Exception as error:  # network, disk, hash and unpickling errors have no common base
        raise WeightsError(_fetch_failed(weights, file, error)) from error
    return clean_state_dict(state, str(file))


def _fetch_failed(weights: Any, file: Path, error: Exception) -> str:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    if file.exists():
        return f"the cached weights {file} of {weights} cannot be read ({reason}); delete that file and try again"
    return (
        f"cannot download {weights} from {weights.url} ({reason}); check the network, or download it elsewhere and pass "
        f"the file (--weights FILE) or put it at {file}; --weights random:0 serves an untrained model"
    )


@contextlib.contextmanager
def _stall_timeout() -> Iterator[None]:
    # torch.hub opens its connection without a timeout; only the default timeout of new sockets applies to it.
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALL_TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _host_answers(url: str) -> bool:
    answered = threading.Event()

    def probe() -> None:
        request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "torch.hub"})  # noqa: S310 https
        # OSError covers refused, unreachable, DNS failures, timeouts and HTTP errors; ValueError a malformed proxy URL.
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S):  # noqa: S310
            answered.set()

    # A thread, because DNS lookups have no timeout; daemon, so that it does not block the exit.
    thread = threading.Thread(target=probe, name="weights-probe", daemon=True)
    thread.start()
    thread.join(PROBE_TIMEOUT_S)
    return answered.is_set()
