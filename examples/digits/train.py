"""Trains a ResNet-18 on scikit-learn's digits and writes the files to serve it. Takes about 45 s on one CPU core.

Run: python -m examples.digits.train OUT
"""

import argparse
import contextlib
import csv
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchvision.models import resnet18

from multiworld_serving.models.preprocessing import Normalize

IMAGE_SIZE = 32
LABELS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# The normalisation of ImageNet, which is the default of the server.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
EPOCHS = 4
BATCH_SIZE = 64
HELD_OUT_FRACTION = 0.2


def digit_images() -> tuple[Tensor, Tensor]:
    """Return all 1797 digits: uint8 [N,3,32,32] in 0..255 (scaled up from 8x8 by Pillow, bilinear), and int64 [N] labels."""
    digits = load_digits()
    grey = (digits.images * (255 / 16)).round().astype(np.uint8)
    return torch.stack([_enlarged(image) for image in grey]), torch.from_numpy(digits.target).long()


def _enlarged(grey: np.ndarray) -> Tensor:
    image = Image.fromarray(grey).convert("RGB").resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def train(seed: int, *, epochs: int = EPOCHS) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Train on four fifths of the digits. The result depends only on the seed. The global random generator is unchanged.

    Uses one thread: two threads gain little on small images, lose much on a busy machine, and change the last bits of the result.

    Returns:
        The state dict with torchvision's names (10 classes, float32), and the held-out fifth:
        uint8 [N,3,32,32] images and int64 [N] labels.
    """
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(seed)
        images, labels = digit_images()
        order = torch.randperm(len(images))
        num_held_out = int(len(images) * HELD_OUT_FRACTION)
        held_out, rest = order[:num_held_out], order[num_held_out:]
        model = resnet18(weights=None, num_classes=len(LABELS))
        _fit(model, images[rest], labels[rest], epochs)
    return model.state_dict(), images[held_out], labels[held_out]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _fit(model: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> None:
    inputs = Normalize(MEAN, STD)(images)
    batches_an_epoch = len(inputs) // BATCH_SIZE
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=epochs * batches_an_epoch)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(inputs))[: batches_an_epoch * BATCH_SIZE]
        for batch in order.view(batches_an_epoch, BATCH_SIZE):
            loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch], label_smoothing=0.05)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    model.eval()


@torch.inference_mode()
def accuracy(state: dict[str, Tensor], images: Tensor, labels: Tensor) -> float:
    """Return the fraction of the uint8 [N,3,32,32] images whose most likely class is their label, computed in one batch."""
    model = resnet18(weights=None, num_classes=len(LABELS)).eval()
    model.load_state_dict(state)
    predicted = model(Normalize(MEAN, STD)(images)).argmax(dim=1)
    return float((predicted == labels).float().mean())


def write(out: Path, state: dict[str, Tensor], images: Tensor, labels: Tensor) -> None:
    """Write the weights, the labels, the held-out images and a table of their labels into the folder `out`."""
    folder = out / "held_out"
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(state, out / "digits.safetensors")
    (out / "labels.txt").write_text("\n".join(LABELS) + "\n", encoding="utf-8")
    with (out / "held_out.csv").open("w", newline="", encoding="utf-8") as table:
        rows = csv.writer(table)
        rows.writerow(["file", "class_id", "label"])
        for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            file = f"held_out/{number:04d}.png"
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(out / file)
            rows.writerow([file, label, LABELS[label]])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train a ResNet-18 on scikit-learn's digits, for serving.")
    parser.add_argument("out", type=Path, help="folder to write digits.safetensors, labels.txt and held_out/ into")
    parser.add_argument("--seed", type=int, default=0, help="of initial weights, order and choice of held-out images")
    options = parser.parse_args()
    start_s = time.monotonic()
    state, images, labels = train(options.seed)
    train_s = time.monotonic() - start_s
    write(options.out, state, images, labels)
    share = accuracy(state, images, labels)
    print(f"{share:.2%} of {len(labels)} held-out digits right, trained in {train_s:.0f} s, written to {options.out}")


if __name__ == "__main__":
    main()
