"""A stage of a model: built from its description, or out of the loaded model; and the unsplit reference.

Stages composed in float32 are, bit for bit, the unsplit model on the same machine: the same modules run in the same
order on the same tensors.
"""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from models.architectures import architecture, block_modules, blueprint
from models.errors import StageError
from models.loading import LoadedModel
from models.preprocessing import Normalize, check_image_size
from models.stage_spec import StageSpec


class Stage(nn.Module):
    """A contiguous run of blocks, in eval mode, gradients off. Its state dict has torchvision's names.

    `forward` takes uint8 images [B,3,H,W] in the first stage (and normalises them), float32 activations [B,C,h,w]
    otherwise; it returns float32 activations, or in the last stage float32 probabilities [B,num_classes]. The input is
    never written to. Moves with `.to(device)`.
    """

    def __init__(self, spec: StageSpec, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """`modules`: those of the stage's blocks with torchvision's names, in order. They are taken, not copied."""
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
            PreprocessingError: the first stage was given something else than uint8 [B,3,H,W].
        """
        for module in self.children():
            batch = module(batch)
        return batch


class Reference(nn.Module):
    """The unsplit model with the stages' normalisation and softmax: uint8 [B,3,H,W] to float32 [B,num_classes]."""

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


def reference(model: LoadedModel) -> Reference:
    """The unsplit model as a callable. Shares the weights of `model`, copies nothing."""
    return Reference(model)


def build_stage(spec: StageSpec) -> Stage:
    """A stage on the CPU whose weights are uninitialised memory: `load_state_dict(weights, strict=True)` comes next.

    Cheap: memory for this stage's weights alone, nothing is drawn at random. A strict load raises RuntimeError when a
    name or shape is missing, unknown or different.
    """
    whole = blueprint(spec.model, spec.num_classes)
    modules = [named for block in spec.blocks for named in block_modules(whole, block)]
    return Stage(spec, [(name, copy.deepcopy(module).to_empty(device="cpu")) for name, module in modules])


def reference_stage(model: LoadedModel, spec: StageSpec) -> Stage:
    """The stage with the weights of `model`, ready to run. It shares them: `copy.deepcopy` it before moving it.

    Raises:
        StageError: `spec` belongs to another model, or to other weights or preprocessing of it.
    """
    _check_belongs(model, spec)
    return Stage(spec, [named for block in spec.blocks for named in block_modules(model.module, block)])


def stage_weights(model: LoadedModel, spec: StageSpec) -> dict[str, Tensor]:
    """What `build_stage(spec).load_state_dict(..., strict=True)` takes: weights and buffers by torchvision's names.

    Float32 (int64 scalars for BatchNorm's counters), CPU, contiguous; they share memory with `model`, so do not write.

    Raises:
        StageError: `spec` belongs to another model, or to other weights or preprocessing of it.
    """
    return dict(reference_stage(model, spec).state_dict())


def stage_input_shape(spec: StageSpec, image_size: int) -> tuple[int, ...]:
    """Shape without the batch dimension of what the stage takes: (3, H, W) uint8 in the first, else (C, h, w) float32.

    Raises:
        PreprocessingError: `image_size` (side in pixels of the square image) is out of range.
    """
    size = check_image_size(image_size)
    if spec.is_first:
        return (3, size, size)
    return architecture(spec.model).output_shape(spec.first_block - 1, size, spec.num_classes)


def stage_output_shape(spec: StageSpec, image_size: int) -> tuple[int, ...]:
    """Shape without the batch dimension of what the stage returns, float32: (C, h, w), or (num_classes,) in the last.

    Raises:
        PreprocessingError: `image_size` (side in pixels of the square image) is out of range.
    """
    return architecture(spec.model).output_shape(spec.end_block - 1, check_image_size(image_size), spec.num_classes)


def stage_input_dtype(spec: StageSpec) -> torch.dtype:
    """torch.uint8 in the first stage, else torch.float32. The output is float32 in every stage."""
    return torch.uint8 if spec.is_first else torch.float32


def _check_belongs(model: LoadedModel, spec: StageSpec) -> None:
    theirs = (spec.model, spec.version, spec.num_classes, spec.mean, spec.std)
    ours = (model.name, model.version, model.num_classes, model.preprocessing.mean, model.preprocessing.std)
    if theirs != ours:
        raise StageError(
            f"stage {spec.index} belongs to {theirs}, not to the loaded model {ours}; cut that model again"
        )
