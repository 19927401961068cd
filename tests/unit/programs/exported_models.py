"""Models that tests export, and functions that return them or their examples."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4, 3))


def images() -> Tensor:
    return torch.randn(2, 3, 9, 9)


def text() -> str:
    return "no module"


def broken() -> int:
    return 1 // 0


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Selecting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        return y[y > 0]


class Marking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        return torch.where(y > 0, y, 0)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4))


def compiled() -> Any:
    return torch.compile(plain())


def parallel() -> nn.Module:
    return nn.DataParallel(compiled())


def distributed() -> nn.Module:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        return nn.parallel.DistributedDataParallel(plain())
    finally:
        torch.distributed.destroy_process_group()


def partly_compiled() -> nn.Module:
    model = plain()
    model[0] = torch.compile(model[0])  # type: ignore[assignment]
    return model


def scripted(model: nn.Module | None = None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(model or plain())


def partly_scripted() -> nn.Module:
    model = plain()
    model[2] = scripted(model[2])
    return model


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        x = self.layer(x)
        if mask is not None:
            x = x * mask
        return x if bias is None else x + 10 * bias


class Difference(nn.Module):
    def forward(self, before: Tensor, after: Tensor) -> Tensor:
        return after - 2 * before


class KeywordOnly(nn.Module):
    def forward(self, x: Tensor, *, scale: Tensor, offset: Tensor | None = None) -> Tensor:
        return x * scale if offset is None else x * scale + offset


class PositionOnly(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None, /, z: Tensor | None = None) -> Tensor:
        return x - (0 if y is None else 2 * y) - (0 if z is None else 3 * z)


class Entries(nn.Module):
    def forward(self, batch: dict[str, Tensor], scale: Tensor | None = None) -> Tensor:
        found = batch["text"] - 3 * batch["mask"]
        return found if scale is None else found * scale


class Listed(nn.Module):
    def forward(self, pair: list[Tensor]) -> Tensor:
        return pair[0] - 2 * pair[1]


class Variadic(nn.Module):
    def forward(self, *tensors: Tensor, **_options: Tensor) -> Tensor:
        return torch.stack(tensors).sum(0)


class One(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def rows(seed: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))


def skipped() -> Any:
    return rows(0), None, rows(1)


def by_parameter() -> Any:
    return {"bias": rows(1), "x": rows(0)}


def keywords() -> Any:
    return {"x": rows(0), "scale": rows(1)}


def entries() -> Any:
    return {"mask": rows(1), "text": rows(0)}


def entries_by_parameter() -> Any:
    return {"scale": rows(2), "batch": {"text": rows(0), "mask": rows(1)}}


def listed() -> Any:
    return {"pair": [rows(0), rows(1)]}


def unknown() -> Any:
    return {"x": rows(0), "maks": rows(1)}


def numbers() -> Any:
    return {"x": rows(0), "bias": 3}


def too_many() -> Any:
    return rows(0), rows(1), rows(2), rows(3)
