"""Operators that a bundle does not allow: exported in terms of allowed ones with equal results, or refused with the way out."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

from multiworld_serving.models.errors import ExportError
from tests.bundles import Computing, exported_bundle

TOLERANCE = 1e-5
Function = Callable[[Tensor], Tensor]
VECTOR, IMAGE, VOLUME, IDS = (4,), (3, 8, 9), (3, 8, 8, 8), (5,)


def shifted(x: Tensor) -> Tensor:
    y = torch.zeros_like(x, dtype=torch.float64)
    y[:, 1:] = x[:, :-1]
    y[:, 0] = 3
    return y


def sampled(mode: str, dims: int) -> Function:
    def compute(x: Tensor) -> Tensor:
        grid = x[:, :dims].movedim(1, -1).flip(1) / 2
        return functional.grid_sample(x, grid, mode, "reflection", align_corners=False)

    return compute


def resized(mode: str, align_corners: bool, **size: object) -> Function:
    return lambda x: functional.interpolate(x, mode=mode, align_corners=align_corners, antialias=True, **size)  # type: ignore[arg-type]


def weighted(x: Tensor) -> Tensor:
    table = torch.arange(18.0).view(9, 2).cos()
    return functional.embedding_bag(x, table, mode="sum", per_sample_weights=(x * 2.0).cos(), padding_idx=1)


def first(layer: nn.Module) -> nn.Module:
    return Computing(lambda found: found[0], layer)


DECOMPOSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "slice assignment": (lambda: Computing(shifted), VECTOR),
    "bilinear samples": (lambda: Computing(sampled("bilinear", 2)), IMAGE),
    "bicubic samples": (lambda: Computing(sampled("bicubic", 2)), IMAGE),
    "samples of a volume": (lambda: Computing(sampled("bilinear", 3)), VOLUME),
    "max_pool3d": (lambda: nn.MaxPool3d(3, 2, 1), VOLUME),
    "bicubic": (lambda: Computing(resized("bicubic", False, size=(5, 20))), IMAGE),
    "bilinear": (lambda: Computing(resized("bilinear", False, size=(3, 4))), IMAGE),
    "aligned corners": (lambda: Computing(resized("bicubic", True, size=(5, 4))), IMAGE),
    "factors": (lambda: Computing(resized("bilinear", False, scale_factor=(0.4, 1.7))), IMAGE),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), IMAGE),
    "weight norm of the last dimension": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 6), dim=1),
        VECTOR,
    ),
    "gru cell": (lambda: nn.GRUCell(4, 5), VECTOR),
    "lstm cell": (lambda: first(nn.LSTMCell(4, 5)), VECTOR),
    "rnn cell": (lambda: nn.RNNCell(4, 5, nonlinearity="relu"), VECTOR),
    "sums of embeddings": (lambda: nn.EmbeddingBag(9, 4, mode="sum"), IDS),
    "means of embeddings": (lambda: nn.EmbeddingBag(9, 4, mode="mean", padding_idx=2), IDS),
    "largest embeddings": (lambda: nn.EmbeddingBag(9, 4, mode="max", padding_idx=2), IDS),
    "weighted embeddings": (lambda: Computing(weighted), IDS),
}


def example(shape: tuple[int, ...], rows: int) -> Tensor:
    torch.manual_seed(rows)
    return torch.randint(9, (rows, *shape)) if shape == IDS else torch.randn(rows, *shape)


@pytest.mark.parametrize("name", DECOMPOSED)
def test_bundle_computes_like_the_model(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape = DECOMPOSED[name]
    module = make()
    bundle = exported_bundle(module, [example(shape, 2)], tmp_path)
    for rows in (1, 3, 8):
        x = example(shape, rows)
        with torch.no_grad():
            expected, (found,) = module(x), bundle.build(bundle.graph)(x)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_bags_with_padding_only_are_zero(tmp_path: Path) -> None:
    module = nn.EmbeddingBag(9, 4, mode="mean", padding_idx=2)
    bundle = exported_bundle(module, [example(IDS, 2)], tmp_path)
    x = torch.tensor([[2, 2, 2, 2, 2], [2, 1, 2, 2, 0]])
    torch.testing.assert_close(bundle.build(bundle.graph)(x)[0], module(x))


STAGE = r"compute this part in a stage in Python before or after the bundle \(docs/models\.md\)"
COMPLEX = "it computes with complex numbers: use their real and imaginary parts"
BOXES = torch.tensor([[0.0, 0, 0, 4, 4], [1, 0, 0, 4, 4]])


def deformed(x: Tensor) -> Tensor:
    found: Tensor = torchvision.ops.deform_conv2d(x, torch.zeros(x.shape[0], 18, 6, 7), torch.ones(3, 3, 3, 3))
    return found


class Counting(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + self.count


def packed(x: Tensor) -> Tensor:
    lengths = (x > 0).sum(1).clamp_min(1)
    found = nn.utils.rnn.pack_padded_sequence(x[..., None], lengths, batch_first=True, enforce_sorted=False)
    return found.data


@pytest.mark.parametrize(
    ("function", "shape", "operator", "advice"),
    [
        (lambda x: torch.fft.rfft(x).abs(), VECTOR, "aten._fft_r2c.default", STAGE),
        (lambda x: (x * 1j).imag, VECTOR, "aten.mul.Tensor", COMPLEX),
        (lambda x: torch.searchsorted(torch.arange(4.0), x), VECTOR, "aten.searchsorted.Tensor", STAGE),
        (lambda x: torch.linalg.inv(x[:, 0, :8, :8]), IMAGE, "aten.linalg_inv_ex.default", STAGE),
        (
            lambda x: x[torchvision.ops.nms(BOXES[:, 1:], torch.ones(2), 0.5)],
            VECTOR,
            "torchvision.nms.default",
            STAGE,
        ),
        (lambda x: torchvision.ops.roi_align(x, BOXES, 2), IMAGE, "torchvision.roi_align.default", STAGE),
        (deformed, IMAGE, "torchvision.deform_conv2d.default", STAGE),
        (lambda x: x + torch.randn(4), VECTOR, "aten.randn.default", "random numbers cannot be exported"),
        (lambda x: functional.dropout(x, 0.5, True), VECTOR, "aten.native_dropout.default", "without them"),
        (packed, VECTOR, "aten._pack_padded_sequence.default", "give the padded sequence to the recurrent layer"),
        (Counting(), VECTOR, "aten.copy_.default", "changes a buffer: state between calls"),
    ],
)
def test_operator_is_refused_with_the_line_and_the_way_out(
    function: Function, shape: tuple[int, ...], operator: str, advice: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=rf"{operator}.*{advice}") as caught:
        exported_bundle(Computing(function), [example(shape, 2)], tmp_path)
    assert "\n" not in str(caught.value)
    if operator != "aten.copy_.default":  # torch records no line for it
        assert re.search(r'/(bundles|test_export_operators)\.py", line', str(caught.value))
