"""Stages of a model, built from a spec or from a loaded model, and the unsplit reference.

Stages composed in float32 are bit-identical to the unsplit model on the same machine: the same modules run in the same order.
"""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from multiworld_serving.models.architectures import architecture, block_modules, meta_model
from multiworld_serving.models.errors import StageError
from multiworld_serving.models.preprocessing import Normalize, check_image_size
from multiworld_serving.models.stage_spec import StageSpec
from multiworld_serving.models.weights.loading import LoadedModel


class Stage(nn.Module):
    """A contiguous range of blocks, in eval mode without gradients. Its state dict has torchvision's names.

    `forward` takes uint8 images [B,3,H,W] in the first stage (and normalises them), float32 activations [B,C,h,w]
    otherwise; it returns float32 activations, or in the last stage float32 probabilities [B,num_classes]. The input is
    never written to. Moves with `.to(device)`.
    """

    def __init__(self, spec: StageSpec, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """`modules`: modules of the stage's blocks with torchvision's names, in order. They are not copied."""
        super().__init__()
        self.spec = spec
        if spec.is_first:
            self.add_module("normalize", Normalize(spec.mean, spec.std))
        for name, module in modules:
            self._add(name, module)
        if spec.is_last:
            self.add_module("softmax", nn.Softmax(dim=1))
        self.eval().requires_grad_(False)

    def _add(self, name: str, module: nn.Module) -> None:
        layer, dot, block = name.partition(".")
        if not dot:
            self.add_module(name, module)
            return
        if layer not in dict(self.named_children()):
            self.add_module(layer, nn.Sequential())
        self.get_submodule(layer).add_module(block, module)

    def forward(self, batch: Tensor) -> Tensor:
        """See the class.

        Raises:
            PreprocessingError: the input of the first stage is not uint8 [B,3,H,W].
        """
        for module in self.children():
            batch = module(batch)
        return batch


class Reference(nn.Module):
    """The unsplit model with normalisation and softmax: uint8 [B,3,H,W] to float32 [B,num_classes]. Shares the model's weights."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        self.normalize = Normalize(model.preprocessing.mean, model.preprocessing.std)
        self.model = model.module
        self.softmax = nn.Softmax(dim=1)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Probabilities of each class.

        Raises:
            PreprocessingError: not uint8 [B,3,H,W].
        """
        probabilities: Tensor = self.softmax(self.model(self.normalize(images)))
        return probabilities


def build_stage(spec: StageSpec) -> Stage:
    """A stage on the CPU with uninitialised weights: call `load_state_dict(weights, strict=True)` next.

    Allocates memory for this stage only. A strict load raises RuntimeError if a name or shape does not match.
    """
    whole = meta_model(spec.model, spec.num_classes)
    modules = [named for block in spec.blocks for named in block_modules(whole, block)]
    return Stage(spec, [(name, copy.deepcopy(module).to_empty(device="cpu")) for name, module in modules])


def reference_stage(model: LoadedModel, spec: StageSpec) -> Stage:
    """The stage with the weights of `model`, ready to run. Weights are shared: `copy.deepcopy` it before moving it.

    Raises:
        StageError: `spec` belongs to another model, or to other weights or preprocessing of it.
    """
    _check_belongs(model, spec)
    return Stage(spec, [named for block in spec.blocks for named in block_modules(model.module, block)])


def stage_weights(model: LoadedModel, spec: StageSpec) -> dict[str, Tensor]:
    """The state dict for `build_stage(spec).load_state_dict(..., strict=True)`, by torchvision's names.

    Float32 (int64 scalars for BatchNorm's counters), CPU, contiguous. The tensors share memory with `model`: do not modify them.

    Raises:
        StageError: `spec` belongs to another model, or to other weights or preprocessing of it.
    """
    return dict(reference_stage(model, spec).state_dict())


def stage_input_shape(spec: StageSpec, image_size: int) -> tuple[int, ...]:
    """Input shape without the batch dimension: (3, H, W) uint8 in the first stage, else (C, h, w) float32.

    Raises:
        PreprocessingError: `image_size` (side in pixels of the square image) is out of range.
    """
    size = check_image_size(image_size)
    if spec.is_first:
        return (3, size, size)
    return architecture(spec.model).output_shape(spec.first_block - 1, size, spec.num_classes)


def stage_output_shape(spec: StageSpec, image_size: int) -> tuple[int, ...]:
    """Output shape without the batch dimension, float32: (C, h, w), or (num_classes,) in the last stage.

    Raises:
        PreprocessingError: `image_size` (side in pixels of the square image) is out of range.
    """
    return architecture(spec.model).output_shape(spec.end_block - 1, check_image_size(image_size), spec.num_classes)


def stage_input_dtype(spec: StageSpec) -> torch.dtype:
    """torch.uint8 in the first stage, else torch.float32. The output of every stage is float32."""
    return spec.input_dtype


def _check_belongs(model: LoadedModel, spec: StageSpec) -> None:
    theirs = (spec.model, spec.version, spec.num_classes, spec.mean, spec.std)
    ours = (model.name, model.version, model.num_classes, model.preprocessing.mean, model.preprocessing.std)
    if theirs != ours:
        raise StageError(
            f"stage {spec.index} belongs to {theirs}, not to the loaded model {ours}; split that model again"
        )
