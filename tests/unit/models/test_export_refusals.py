"""A model that cannot be exported is refused with its line and with what to change, and is exported after that change."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree

from multiworld_serving.models.errors import ExportError
from tests.bundles import Computing, exported_bundle


class DynamicCache:
    """Not a tensor, as the caches of transformers."""


def branching(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def with_where(x: Tensor) -> Tensor:
    return torch.where(x.sum(1, keepdim=True) > 0, x, -x)


def sized(x: Tensor) -> Tensor:
    return x[:, : int(x.abs().max()) + 1]


def added_to_constant(x: Tensor) -> Tensor:
    return x + torch.ones(2, 4)


def added_to_rows(x: Tensor) -> Tensor:
    return x + torch.ones(x.shape[0], 4)


def reshaped(x: Tensor) -> Tensor:
    return x.view(len(x), 2, 2)


def infinite(x: Tensor) -> Tensor:
    return x.masked_fill(x < 0, -torch.inf)


def lowest(x: Tensor) -> Tensor:
    return x.masked_fill(x < 0, torch.finfo(x.dtype).min)


def conditional(x: Tensor) -> Tensor:
    found: Tensor = torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))
    return found


def added_in_place(x: Tensor) -> Tensor:
    x += 1
    return x * 2


def on_cuda(x: Tensor) -> Tensor:
    return x + torch.ones(4, device="cuda")


def padded(x: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x[..., None], torch.full((x.shape[0],), 4), batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(nn.LSTM(1, 1, batch_first=True)(packed)[0], batch_first=True)[0]


def halved(x: Tensor) -> Tensor:
    one, other = torch.cat([x, x]).chunk(2)
    return one + other


def cached(use_cache: bool) -> Callable[[Tensor], dict[str, Any]]:
    return lambda x: {"logits": x * 2} | ({"past_key_values": DynamicCache()} if use_cache else {})


REFUSED: list[tuple[Callable[[Tensor], Any], str, str, Callable[[Tensor], Any]]] = [
    (branching, "return x if x.sum() > 0 else -x", "choose between results with torch.where", with_where),
    (branching, "", "or write it as a stage in Python (docs/models.md)", with_where),
    (padded, "pad_packed_sequence(", "take sizes from shapes or constants", lambda x: x[..., None]),
    (lambda x: x * x.max().item(), "function(x)", "takes a number from a tensor", lambda x: x * x.amax(1, True)),
    (halved, "torch.cat([x, x]).chunk(2)", "and no split of dimension 0", lambda x: x[:, :2] + x[:, 2:]),
    (sized, "int(x.abs().max())", "take sizes from shapes or constants", lambda x: x[:, : x.shape[1] // 2]),
    (added_to_constant, "torch.ones(2, 4)", "is always 2 (File", added_to_rows),
    (reshaped, "x.view(len(x), 2, 2)", "write x.shape[0] for the number of rows", lambda x: x.view(x.shape[0], 2, 2)),
    (infinite, "", "the output 'y' contains infinity or NaN for the example; return finite", lowest),
    (added_in_place, "", "compute a new tensor, such as x = x + 1", lambda x: (x + 1) * 2),
    (
        lambda x: {"z": x, "loss": x.mean()},
        "function(x)",
        "the output 'loss' [] is not the batch (File",
        lambda x: x.mean(1),
    ),
    (lambda x: x.T, "function(x)", "the output 'y' [4, batch] is not the batch", lambda x: x.T.movedim(1, 0)),
    (cached(True), "", "the model returns a DynamicCache; set config.use_cache = False", cached(False)),
    (
        lambda x: (x, DynamicCache),
        "",
        "the model returns a type; return tensors, or tuples and dicts",
        lambda x: (x, x),
    ),
]


@pytest.mark.parametrize(("function", "line", "advice", "changed"), REFUSED)
def test_model_is_refused_with_its_line_and_exported_after_the_change(
    function: Callable[[Tensor], Any], line: str, advice: str, changed: Callable[[Tensor], Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    example = torch.randn(2, 4)
    with pytest.raises(ExportError) as caught:
        exported_bundle(Computing(function), [example.clone()], tmp_path, output="y")
    message = str(caught.value)
    assert advice in message
    assert line in message
    assert not line or re.search(r"/(bundles|test_export_refusals)\.py", message)
    assert "\n" not in message

    bundle, x = exported_bundle(Computing(changed), [example], tmp_path, output="y"), torch.randn(3, 4)
    found = bundle.build(bundle.graph)(x)
    torch.testing.assert_close(list(found), _pytree.tree_leaves(changed(x)))


def test_branch_by_function_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"functions to cond.*; compute both results and choose with torch\.where"):
        exported_bundle(Computing(conditional), [torch.ones(2, 4)], tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model computes with a GPU")
def test_device_of_the_model_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=r'torch.ones\(4, device="cuda"\)\); create tensors on the device of the inputs'
    ):
        exported_bundle(Computing(on_cuda), [torch.ones(2, 4)], tmp_path)


def test_attention_of_the_hint_is_exported(tmp_path: Path) -> None:
    """The way out for FlexAttention."""

    def attend(x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    bundle, x = exported_bundle(Computing(attend), [torch.randn(2, 2, 5, 8)], tmp_path), torch.randn(3, 2, 5, 8)
    torch.testing.assert_close(bundle.build(bundle.graph)(x)[0], attend(x))
