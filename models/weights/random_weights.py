"""Random weights from a seed, for trying out the service and for tests."""

import copy

import torch
from torch import nn
from torchvision.models.resnet import Bottleneck

from multiworld_serving.models.architectures import meta_model, residual_blocks
from multiworld_serving.models.errors import WeightsError

_MAX_SEED = 2**63 - 1
_FC_STD = 0.5


def parse_seed(text: str) -> int:
    """The seed in "random:SEED".

    Raises:
        WeightsError: the seed is not a whole number from 0 to 2**63 - 1.
    """
    digits = text.removeprefix("random").removeprefix(":")
    if not (digits.isascii() and digits.isdecimal()) or int(digits[:20]) > _MAX_SEED:
        raise WeightsError(f"weights {text!r} have no valid seed; expected random:SEED with a number, such as random:0")
    return int(digits)


def random_model(name: str, seed: int, num_classes: int = 1000) -> nn.Module:
    """Model `name` with weights drawn from `seed`, identical in every call. Does not use the global generator.

    Float32, CPU, eval mode, without gradients. Convolutions are initialised as in torchvision (Kaiming, fan out). With this alone, the
    activations of an untrained ResNet grow with every residual block, to 1e7 in a ResNet-152, and softmax returns exactly 0 or 1. So the
    last BatchNorm of each of the L residual blocks scales by 1/sqrt(L), which bounds the growth for every L, and the last layer is drawn
    such that logits differ by a few units. The output is then a distribution that depends on the image.
    """
    model = copy.deepcopy(meta_model(name, num_classes)).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        _initialise(module, generator)
    blocks = residual_blocks(model)
    for block in blocks:
        last_norm = block.bn3 if isinstance(block, Bottleneck) else block.bn2
        nn.init.constant_(last_norm.weight, len(blocks) ** -0.5)
    return model


def _initialise(module: nn.Module, generator: torch.Generator) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
    elif isinstance(module, nn.BatchNorm2d):
        module.reset_parameters()  # weight 1, bias 0, running mean 0, running variance 1, counter 0
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=_FC_STD, generator=generator)
        nn.init.zeros_(module.bias)
