"""Invalid arguments are rejected before an operation starts."""

import re
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from multiworld import WorldCommunicator
from multiworld.ops.p2p import send_message
from multiworld.ops.validation import WorldFacts

t = torch.zeros
Call = Callable[[WorldCommunicator, str], Awaitable[None]]

WRONG: dict[str, tuple[type[Exception], str, Call]] = {
    "send to oneself": (ValueError, "rank 0 is not a peer", lambda c, w: c.send(t(1), 0, w)),
    "send to nobody": (ValueError, "rank 3 is not a peer", lambda c, w: c.send(t(1), 3, w)),
    "recv from nobody": (ValueError, "rank -1 is not a peer", lambda c, w: c.recv(t(1), -1, w)),
    "recv into expanded": (ValueError, "use the same memory", lambda c, w: c.recv(t(1).expand(4), 1, w)),
    "tag too high": (ValueError, "tag must be", lambda c, w: c.send(t(1), 1, w, tag=1 << 29)),
    "tag below zero": (ValueError, "tag must be", lambda c, w: c.recv(t(1), 1, w, tag=-1)),
    "no tensor": (TypeError, "expected a tensor, got list", lambda c, w: c.send([1.0], 1, w)),  # type: ignore[arg-type]
    "sparse": (TypeError, "dense", lambda c, w: c.broadcast(t(3, 3).to_sparse(), 0, w)),
    "meta": (TypeError, "dense", lambda c, w: c.all_reduce(torch.zeros(3, device="meta"), world_name=w)),
    "broadcast root": (ValueError, "rank 3 does not exist", lambda c, w: c.broadcast(t(1), 3, w)),
    "reduce root": (ValueError, "rank -1 does not exist", lambda c, w: c.reduce(t(1), -1, world_name=w)),
    "gather without list": (ValueError, "must pass gather_list", lambda c, w: c.gather(t(1), None, 0, w)),
    "gather list elsewhere": (ValueError, "for rank 1 only", lambda c, w: c.gather(t(1), [t(1)] * 3, 1, w)),
    "gather list short": (ValueError, "list of 3 tensors", lambda c, w: c.gather(t(1), [t(1)] * 2, 0, w)),
    "gather sizes": (ValueError, "tensor 1 of the list", lambda c, w: c.gather(t(1), [t(1), t(2), t(1)], 0, w)),
    "gather dtypes": (TypeError, "int64", lambda c, w: c.gather(t(1), [t(1), t(1), t(1).long()], 0, w)),
    "gather aliases": (ValueError, "same memory", lambda c, w: c.gather(t(1), [t(1)] * 3, 0, w)),
    "scatter without list": (ValueError, "must pass scatter_list", lambda c, w: c.scatter(t(1), [], 0, w)),
    "scatter list elsewhere": (ValueError, "for rank 2 only", lambda c, w: c.scatter(t(1), [t(1)] * 3, 2, w)),
    "scatter list long": (ValueError, "list of 3 tensors", lambda c, w: c.scatter(t(1), [t(1)] * 4, 0, w)),
    "all_gather list": (ValueError, "list of 3 tensors", lambda c, w: c.all_gather([t(1)], t(1), w)),
    "all_gather_into_tensor": (ValueError, "3 times", lambda c, w: c.all_gather_into_tensor(t(4), t(1), w)),
    "all_gather_into_tensor dtypes": (TypeError, "int64", lambda c, w: c.all_gather_into_tensor(t(3).long(), t(1), w)),
    "reduce_scatter list": (ValueError, "list of 3", lambda c, w: c.reduce_scatter(t(1), [t(1)], world_name=w)),
    "reduce_scatter sizes": (
        ValueError,
        "tensor 0 of the list",
        lambda c, w: c.reduce_scatter(t(1), [t(2)] * 3, world_name=w),
    ),
    "reduce_scatter_tensor": (ValueError, "3 times", lambda c, w: c.reduce_scatter_tensor(t(1), t(2), world_name=w)),
    "all_to_all lists": (ValueError, "one input", lambda c, w: c.all_to_all([t(1)] * 3, [t(1)], w)),
    "all_to_all dtypes": (TypeError, "one dtype", lambda c, w: c.all_to_all([t(1), t(1), t(1)], [t(1).int()] * 3, w)),
    "all_to_all aliases": (ValueError, "same memory", lambda c, w: c.all_to_all([t(1)] * 3, [t(1)] * 3, w)),
    "all_to_all own part": (ValueError, "the own rank", lambda c, w: c.all_to_all([t(2), t(1), t(1)], [t(1)] * 3, w)),
    "average of integers": (TypeError, "AVG", lambda c, w: c.all_reduce(t(1).int(), ReduceOp.AVG, w)),
    "bits of floats": (TypeError, "BAND", lambda c, w: c.all_reduce(t(1), ReduceOp.BAND, w)),
    "sum of bools": (TypeError, "SUM", lambda c, w: c.reduce(t(1).bool(), 0, ReduceOp.SUM, w)),
    "int16": (TypeError, "int16", lambda c, w: c.all_reduce(t(1).short(), ReduceOp.SUM, w)),
    "float8": (TypeError, "float8", lambda c, w: c.all_reduce(t(1).to(torch.float8_e5m2), ReduceOp.MAX, w)),
    "order of complex": (TypeError, "complex", lambda c, w: c.all_reduce(t(1).to(torch.complex64), ReduceOp.MAX, w)),
    "unknown reduction": (ValueError, "not supported", lambda c, w: c.all_reduce(t(1), ReduceOp.PREMUL_SUM, w)),
    "conjugated output": (ValueError, "conjugated", lambda c, w: c.recv(t(1).to(torch.complex64).conj(), 1, w)),
}


class OneWorld:
    """Finds the world of rank 0 of three members, on which no operation may start."""

    def world(self, world_name: str) -> Any:
        return SimpleNamespace(facts=WorldFacts(world_name, 0, 3), start=self._start)

    def is_broken(self, world_name: str) -> bool:
        return False

    def _start(self, *_: object, **__: object) -> None:
        raise AssertionError("an operation started")


@pytest.mark.parametrize(
    ("header", "payload", "words"),
    [(bytes(49), None, "49 bytes; expected at most 48"), (b"", torch.empty(1, device="meta"), "move it to the CPU")],
)
def test_message_is_refused_when_it_cannot_be_sent(header: bytes, payload: torch.Tensor | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        send_message(WorldFacts("w", 0, 3), header, payload, 1, 0)


@pytest.mark.parametrize("what", WRONG)
async def test_invalid_arguments_are_rejected_before_anything_is_sent(what: str) -> None:
    expected, words, call = WRONG[what]
    with pytest.raises(expected, match=re.escape(words)):
        await call(WorldCommunicator(OneWorld()), "w")
