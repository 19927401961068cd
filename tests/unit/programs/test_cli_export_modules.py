"""`multiworld export` of modules that are wrapped, or that no graph can compute."""

from pathlib import Path

import pytest
import torch
from torch import nn

from multiworld_serving.cli.main import main
from multiworld_serving.models.bundle.files import read_bundle

MODELS = """
import warnings
import torch
from torch import nn

def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4))

def compiled():
    return torch.compile(plain())

def parallel():
    return nn.DataParallel(torch.compile(plain()))

def distributed():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return nn.parallel.DistributedDataParallel(plain())
    finally:
        torch.distributed.destroy_process_group()

def partly_compiled():
    model = plain()
    model[0] = torch.compile(model[0])
    return model

def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(plain())

def partly_scripted():
    model = plain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model[2] = torch.jit.script(model[2])
    return model

class Selecting(nn.Module):
    def forward(self, x):
        y = x * 2
        return y[y > 0]

class Marking(nn.Module):
    def forward(self, x):
        y = x * 2
        return torch.where(y > 0, y, 0)
"""


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(MODELS)


def export(model: str, *options: str) -> int:
    options = (*options, "--input", "x:float32[batch,4]", "--max-batch-size", "3")
    return main(["export", f"m.py:{model}", "-o", "out", *options])


@pytest.mark.parametrize("model", ["compiled", "parallel", "distributed", "partly_compiled"])
def test_wrapper_is_removed(model: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4)).eval()
    torch.save(plain.state_dict(), "plain.pt")
    assert export(model, "--weights", "plain.pt") == 0
    bundle, x = read_bundle(Path("out")), torch.randn(3, 4)
    torch.testing.assert_close(bundle.build(bundle.graph)(x)[0], plain(x))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("scripted", "the model is a TorchScript module, which torch.export cannot capture; export the nn.Module"),
        ("partly_scripted", "the model.2 is a TorchScript module"),
        ("Selecting", ", in forward return y[y > 0]); keep all elements and mark some"),
    ],
)
def test_module_is_refused_with_one_line(model: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(model) == 2
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith("multiworld: error:")
    assert message in error
    assert not Path("out").exists()


def test_elements_are_marked_as_the_message_says() -> None:
    assert export("Marking") == 0
    bundle, x = read_bundle(Path("out")), torch.randn(3, 4)
    torch.testing.assert_close(bundle.build(bundle.graph)(x)[0], (2 * x).clamp_min(0))
