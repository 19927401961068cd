"""A vision transformer of torchvision in a small configuration."""

import torch
from torchvision.models import VisionTransformer


def make() -> VisionTransformer:
    """Images 64x64 in patches of 16x16, four layers, 10 classes, random weights."""
    torch.manual_seed(0)
    return VisionTransformer(
        image_size=64, patch_size=16, num_layers=4, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10
    )
