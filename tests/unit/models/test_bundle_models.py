"""Models of several families are exported, read back, cut into 1, 2 and 4 stages, and compute what they compute in eager mode."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils import _pytree

from multiworld_serving.models.bundle.cutting import cut_graph
from multiworld_serving.models.bundle.files import read_bundle
from multiworld_serving.models.bundle.nodes import BATCH
from multiworld_serving.models.bundle.rows import MAX_COMPUTED_BYTES
from multiworld_serving.models.errors import BundleError, ExportError
from multiworld_serving.models.export.exporter import ExportSettings, export_model
from multiworld_serving.models.export.trace import Dynamic, capture
from multiworld_serving.models.preprocessing import Preprocessing
from multiworld_serving.server.leader.versions.stage_plan import make_bundle_plan
from tests.bundles import Computing, exported_bundle

TOLERANCE = 1e-5


class OtherOperators(nn.Module):
    """Operators of transformers and timm that the other models here lack. The second output is boolean."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.randn(3, 1, 1)), nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        image = torch.cat(image.chunk(2, 2)[::-1], 2)
        for _ in range(4):
            kept = (image > -1) & (image < 1) | (image > 2)
            image = torch.where(
                kept, torch.addcmul(self.bias, self.scale, image), torch.min(image, torch.ones_like(image))
            )
        return image, image > 0


class Recurrent(nn.Module):
    """Predicts tokens from token ids with recurrent layers of each kind. The weights of the first and the last layer are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.words.weight
        self.layers = nn.ModuleList([nn.GRU(16, 8, 2, batch_first=True), nn.LSTM(8, 8, batch_first=True)])
        self.layers.append(nn.RNN(8, 8, batch_first=True, bidirectional=True))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids)
        for layer in self.layers:
            hidden = layer(hidden)[0]
        found: Tensor = self.head(hidden.mean(1))
        return found


class NormalisedPositions(nn.Module):
    """Normalises all positions of all rows together, as LeViT does: the first dimension of that tensor is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.norm = nn.BatchNorm1d(6)

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = layer(rows)
            rows = self.norm(rows.flatten(0, 1)).reshape_as(rows).relu()
        return rows


class Masked(nn.Module):
    """Returns a vector for each token. Attention ignores padding, which is token 0, with a mask that contains -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 4)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.encoder(self.words(ids), src_key_padding_mask=ids == 0)
        return found


def image(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(2, 3, size, size),)


def tokens(length: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 50, (2, length)),)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "vision transformer": (lambda: torchvision.models.VisionTransformer(32, 8, 2, 4, 64, 128), image(32)),
    "swin": (lambda: torchvision.models.SwinTransformer([4, 4], 32, [2, 1], [2, 4], [4, 4]), image(64)),
    "other operators": (OtherOperators, image(8)),
    "recurrent": (Recurrent, tokens(5)),
    "normalised positions": (NormalisedPositions, (torch.randn(2, 8, 6),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_bundle_computes_like_the_model_in_any_number_of_stages(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, example = MODELS[name]
    module = make().eval()
    bundle = exported_bundle(module, example, tmp_path, num_stages=2)
    assert len(bundle.stages) == 2
    if name == "recurrent":
        parameters = sum(parameter.numel() * 4 for parameter in module.parameters())
        written = sum(each.nbytes for each in load_file(tmp_path / "bundle" / "weights.safetensors").values())
        assert written == pytest.approx(parameters, rel=0.01), "tied weights are written once"
    for num_stages in (1, 2, 4):
        cut = cut_graph(bundle.graph, bundle.manifest.costs_s, num_stages, bundle.manifest.lengths[-1])
        stages = [bundle.build(stage) for stage in bundle.graph.cut(cut.positions)]
        assert len(stages) == num_stages
        for rows in (1, 3, 8):
            values = tuple(tensor[:1].repeat(rows, *[1] * (tensor.ndim - 1)) for tensor in example)
            with torch.no_grad():
                expected = [value for value in _pytree.tree_leaves(module(*values)) if isinstance(value, Tensor)]
                for stage in stages:
                    values = stage(*values)
            for found, wanted in zip(values, expected, strict=True):
                assert found.dtype == wanted.dtype
                assert (found.double() - wanted.double()).abs().max() <= TOLERANCE * wanted.double().abs().max()


def test_padded_positions_are_computed_and_minus_infinity_crosses_cuts_when_attention_is_masked(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, ids = Masked().eval(), torch.tensor([[3, 4, 5, 0, 0], [6, 0, 0, 0, 0]])
    enabled = torch.backends.mha.get_fastpath_enabled()
    bundle = exported_bundle(module, (ids,), tmp_path, num_stages=2)
    assert torch.backends.mha.get_fastpath_enabled() == enabled
    assert any(each.isinf().any() for each in bundle.self_test.values())
    torch.testing.assert_close(
        bundle.build(bundle.graph)(ids)[0], module(ids)
    )  # with gradients, torch has no fast path
    for num_stages in (1, 2, 3):
        for plan in make_bundle_plan(bundle, num_stages):
            assert plan.check_self_test(plan.self_test_output) is None


def similarities(vectors: Tensor) -> Tensor:
    """Of all pairs of vectors [B,L,4]: [B,L,L], whose largest values [B,L] it returns."""
    vectors = vectors.relu()
    return (vectors @ vectors.transpose(1, 2)).relu().sigmoid().amax(2)


@pytest.mark.parametrize(("length", "crosses"), [(2, (BATCH, "vectors_1", "vectors_1")), (64, (BATCH, "vectors_1", 4))])
def test_cut_is_where_the_fewest_bytes_cross_at_the_largest_lengths(
    length: int, crosses: tuple[str | int, ...]
) -> None:
    dynamic = (Dynamic((("vectors", 1),), 2, 64),)
    graph, _ = capture(
        Computing(similarities), (torch.randn(2, 6, 4),), ("vectors",), max_batch_size=8, dynamic=dynamic
    )
    costs_s = [1.0, *[1e-9] * (len(graph.nodes) - 2), 1.0]
    cut = cut_graph(graph, costs_s, 2, {"vectors_1": length})
    (stage, _) = graph.cut(cut.positions)
    assert [stage.tensor(name).shape for name in stage.outputs] == [crosses]
    assert cut.boundary_bytes == (4 * length * (length if crosses[2] != 4 else 4),)


def test_model_is_refused_when_a_row_of_computed_length_may_be_too_long_to_send(tmp_path: Path) -> None:
    dynamic = (Dynamic((("row", 1),), 2, (MAX_COMPUTED_BYTES >> 12) + 1),)
    longer = Computing(lambda row: row.repeat_interleave(1024, 1))
    with pytest.raises(BundleError, match=r"a row of the output .* at most 67108864"):
        exported_bundle(longer, (torch.randn(2, 6),), tmp_path, inputs=("row",), dynamic=dynamic)


def test_bundle_takes_images_and_returns_probabilities_when_preprocessing_and_labels_are_given(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()
    preprocessing = Preprocessing(10, 8, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    labels = ("daisy", "rose", "tulip")
    options = ExportSettings("flowers", "2", ("images",), max_batch_size=4, image=preprocessing, labels=labels)
    export_model(module, image(8), tmp_path / "flowers.zip", options)
    bundle = read_bundle(tmp_path / "flowers.zip")
    assert (bundle.manifest.labels, bundle.manifest.image) == (labels, preprocessing)
    pixels = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocessing.mean, preprocessing.std))
    with torch.no_grad():
        expected = module((pixels / 255 - mean) / std).softmax(1)
    (found,) = bundle.build(bundle.graph)(pixels)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "shape", "operator"),
    [
        (lambda: Computing(lambda x: x - x.mean(0)), (4,), "aten.mean.dim"),
        (lambda: Computing(lambda x: x.flip(0).cumsum(0).flip(0)), (4,), "aten.flip.default"),
        (lambda: Computing(lambda x: x.softmax(0)), (4,), "aten.*softmax.*"),
        (lambda: Computing(lambda x: x + x[:1]), (4,), "aten.slice.Tensor"),
        (lambda: Computing(lambda x: (x @ x.T) @ x), (4,), "aten.mm.default|aten.matmul.default"),
        (lambda: nn.BatchNorm2d(3, track_running_stats=False), (3, 8, 8), "aten._native_batch_norm_legit.no_stats"),
    ],
)
def test_model_is_refused_with_the_operator_when_it_mixes_rows(
    model: Callable[[], nn.Module], shape: tuple[int, ...], operator: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    with pytest.raises(ExportError, match=f"mixes the rows of a batch: [^ ]*({operator})"):
        exported_bundle(model(), (torch.randn(2, *shape),), tmp_path)


class Positions(nn.Module):
    """Adds a vector for each of 256 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(50, 8), nn.Embedding(256, 8)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return found


def test_model_is_refused_when_it_fails_at_the_largest_length(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"fails at x_1 512: index out of range"):
        exported_bundle(Positions(), tokens(12), tmp_path, dynamic=(Dynamic((("x", 1),), 1, 512),))


def halve(image: Tensor) -> Tensor:
    """Adds a smaller image, enlarged, as a U-Net does. Its sizes fit for even lengths only."""
    return image + nn.functional.interpolate(nn.functional.max_pool2d(image, 2), scale_factor=2)


def test_refusal_says_what_to_change_for_variable_lengths(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"Recurrent layers .* have a fixed length"):
        exported_bundle(Recurrent(), tokens(12), tmp_path, dynamic=(Dynamic((("x", 1),), 2, 64),))
    with pytest.raises(ExportError, match="some lengths only, for example multiples of 4"):
        exported_bundle(Computing(halve), image(16), tmp_path, dynamic=(Dynamic((("x", 2),), 8, 64),))
