"""Which tensors the operations accept: they own the memory of their elements, and no two elements that are written share memory."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from multiworld.elastic.calls import flatten
from multiworld.ops import p2p
from multiworld.ops.buffers import check_distinct
from multiworld.ops.validation import WorldFacts

FACTS = WorldFacts("w", 0, 2)
BASE = torch.arange(48.0)
LAYOUTS = {
    "step 2": BASE[::2],
    "column": BASE.view(6, 8)[:, 3],
    "transposed": BASE.view(6, 8).t(),
    "expanded": BASE[:1].expand(5),
    "offset": BASE[7:19],
    "channels last": BASE.view(1, 3, 4, 4).to(memory_format=torch.channels_last),
    "0-d": BASE[5],
    "empty": BASE[:0],
    "size 1 with odd strides": BASE.as_strided((1, 4, 1), (7, 1, 13), 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_elements_are_flattened_and_sent_in_order_when_the_tensor_is_a_view(layout: str) -> None:
    tensor = LAYOUTS[layout]
    assert flatten([tensor]).tolist() == tensor.flatten().tolist()
    assert flatten([tensor]).is_contiguous()
    sent = torch.tensor(list(p2p.send(FACTS, tensor, 1, 0).memory), dtype=torch.uint8).view(torch.float32)
    assert sent.tolist() == tensor.flatten().tolist()


def _resized(size_bytes: int) -> Tensor:
    tensor = torch.ones(64)
    tensor.untyped_storage().resize_(size_bytes)
    return tensor


def _fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(4)


@pytest.mark.parametrize("tensor", [_resized(0), _resized(8), _fake()], ids=["freed", "shrunk", "fake"])
@pytest.mark.parametrize("operation", [p2p.send, p2p.recv])
def test_tensor_is_refused_when_it_does_not_own_its_memory(operation: object, tensor: Tensor) -> None:
    with pytest.raises(TypeError, match=r"expected a plain tensor|freed or is too small"):
        operation(FACTS, tensor, 1, 0)  # type: ignore[operator]


def test_receive_is_refused_when_elements_of_the_tensor_overlap() -> None:
    for tensor in (torch.ones(8).unfold(0, 4, 2), torch.ones(8).as_strided((2, 3), (1, 1))):
        with pytest.raises(ValueError, match="use the same memory"):
            p2p.recv(FACTS, tensor, 1, 0)


def test_results_are_refused_only_when_they_share_elements() -> None:
    base = torch.ones(4, 6)
    check_distinct("x", [*base.unbind(1), base[:, :0]])
    check_distinct("x", list(base.unbind(0)))
    for outputs in ([base[0, :4], base[0, 3:]], [base[1], base[:, 2]], [base[0], base[0]]):
        with pytest.raises(ValueError, match="same memory"):
            check_distinct("x", outputs)
