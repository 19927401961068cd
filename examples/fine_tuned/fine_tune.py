"""Replaces the last layer of a ResNet-18, trains it on 37 classes, and writes a state dict and the labels.

Run: python -m examples.fine_tuned.fine_tune hues.pth hues.txt

The classes are 37 hues, and the images are drawn, so nothing is downloaded. Replace `batch` by your photos, and give `--weights DEFAULT`.
"""

import argparse
import colorsys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.models import resnet18

CLASSES = 37
LABELS = tuple(f"hue {360 * number // CLASSES}" for number in range(CLASSES))
SIZE = 32
_COLORS = torch.tensor([colorsys.hsv_to_rgb(number / CLASSES, 1.0, 1.0) for number in range(CLASSES)])
_MEAN, _STD = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One noisy image of each class: normalised float32 [37,3,32,32], and int64 [37] labels."""
    noise = 0.1 * torch.randn((CLASSES, SIZE, SIZE, 3), generator=generator)
    images = (_COLORS[:, None, None] + noise).clamp(0, 1)
    return ((images - _MEAN) / _STD).permute(0, 3, 1, 2), torch.arange(CLASSES)


def fine_tune(weights: str | None, steps: int) -> nn.Module:
    """A ResNet-18 in eval mode whose last layer has learned the classes. All other layers keep their weights."""
    torch.manual_seed(0)
    model = resnet18(weights=weights).eval().requires_grad_(False)
    model.fc = nn.Linear(model.fc.in_features, CLASSES)
    optimizer = torch.optim.Adam(model.fc.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        images, labels = batch(generator)
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        print(f"step {step + 1}: loss {loss.item():.2f}")
    tuned: nn.Module = model
    return tuned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="file to write, .pth")
    parser.add_argument("labels", type=Path, help="file to write, one label per line")
    parser.add_argument("--weights", help="of the other layers, such as DEFAULT; by default random")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.save(fine_tune(options.weights, options.steps).state_dict(), options.checkpoint)
    options.labels.write_text("\n".join(LABELS) + "\n")


if __name__ == "__main__":
    main()
