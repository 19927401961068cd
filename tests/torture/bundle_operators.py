"""Fuzzes the operators that a bundle may use: graphs with wrong shapes, modes and values, and hostile inputs of a client.

    python -m tests.torture.bundle_operators --minutes 10 --seed 7

A case is a graph with one operator, whose arguments are random. If `check_graph` accepts it, the graph computes batches of several sizes,
also of sizes for which it was not checked, from inputs with extreme values. Two processes compute the same cases. The memory around their
tensors has other values in each process, and so has memory that is allocated and not written, so results that differ contain something
that is not the graph's. A finding is such a result, a signal that ends a process, a write outside of a tensor, or memory that is kept.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from multiworld_serving.models.bundle import operators
from multiworld_serving.models.bundle.checking import check_graph
from multiworld_serving.models.bundle.graph import Graph
from multiworld_serving.models.bundle.nodes import DTYPES, literal
from multiworld_serving.models.errors import ModelError

BATCHES = (1, 2, 8)
"""Sizes for which a graph is checked."""
COMPUTED = (1, 2, 3, 5, 8)
"""Sizes that it computes."""
MEMORY_BYTES = 3 << 30
KEPT_BYTES = 400 << 20
"""More than the caches of torch keep."""
GUARD = 64
"""Elements before and after each tensor."""
INTEGERS = (0, 1, 1, 1, 2, 2, 3, -1, -2, 4, 7, 100, 1 << 31, -(1 << 31), 1 << 62, -(1 << 63))
FLOATS = ("0.0", "1.0", "0.5", "-1.0", "2.5", "1e30", "inf", "-inf", "nan", "1e-30")
TEXTS = (
    *("trunc", "floor", "none", "tanh", "ij", "xy", "constant", "reflect", "replicate", "circular", "same", "valid"),
    *("sum", "prod", "mean", "amax", "amin", "unknown", "ab,bc->ac", "bij,bjk->bik", "..., ...->...", "ii->i"),
)
EXTREME = {
    True: (float("inf"), float("-inf"), float("nan"), 3e38, -0.0, 1e-40),
    False: (-(1 << 63), (1 << 63) - 1, -1, 1 << 40),
}
NAMES = {DTYPES[name]: name for name in DTYPES}
ERRORS = (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError, MemoryError)
"""Of operators. NotImplementedError is a RuntimeError."""


def equal(rank: int, **values: int) -> dict[str, list[int]]:
    """Each value for all of `rank` dimensions."""
    return {name: [value] * rank for name, value in values.items()}


B = "batch"
POOL = {"kernel_size": 2, "stride": 2, "dilation": 1}
CONVOLUTION = {"stride": 1, "padding": 1, "dilation": 1}
COLUMNS = {"kernel_size": 2, "dilation": 1, "padding": 0, "stride": 1}
RECURRENT: dict[str, Any] = {
    **{"has_biases": True, "num_layers": 1, "dropout": {"float": "0.0"}},
    **{"train": False, "bidirectional": False, "batch_first": True},
}
FITTING: dict[str, dict[str, Any]] = {
    "_adaptive_avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d": {"self": (B, 3, 6, 6), "output_size": [2, 3]},
    "_adaptive_avg_pool3d adaptive_avg_pool3d": {"self": (B, 3, 4, 4, 4), "output_size": [2, 2, 1]},
    "adaptive_avg_pool1d": {"self": (B, 3, 6), "output_size": [2]},
    "avg_pool1d max_pool1d": {"self": (B, 3, 6), **equal(1, **POOL, padding=0)},
    "avg_pool2d max_pool2d max_pool2d_with_indices": {"self": (B, 3, 6, 6), **equal(2, **POOL, padding=1)},
    "avg_pool3d max_pool3d_with_indices": {"self": (B, 2, 4, 4, 4), **equal(3, **POOL, padding=0)},
    "_cdist_forward": {"x1": (B, 4, 3), "x2": (B, 5, 3), "compute_mode": 1},
    "_log_softmax _softmax": {"dim": 1, "half_to_float": False},
    "_native_batch_norm_legit_no_training _native_batch_norm_legit batch_norm": {
        **{"input": (B, 3, 4, 4), "weight": (3,), "bias": (3,), "running_mean": (3,), "running_var": (3,)},
        **{"training": False, "cudnn_enabled": False, "use_input_stats": True},
    },
    "instance_norm": {"input": (B, 3, 4, 4), "weight": (3,), "bias": (3,), "running_mean": None, "running_var": None},
    "native_group_norm": {"input": (B, 4, 6), "weight": (4,), "bias": (4,), "C": 4, "HxW": 6, "group": 2, "N": "n"},
    "group_norm": {"input": (B, 4, 6), "num_groups": 2, "weight": (4,), "bias": (4,)},
    "native_layer_norm layer_norm rms_norm": {
        "input": (B, 4, 6),
        "normalized_shape": [6],
        "weight": (6,),
        "bias": (6,),
    },
    "addmm": {"self": (3,), "mat1": (B, 4), "mat2": (4, 3)},
    "baddbmm": {"self": (B, 2, 3), "batch1": (B, 2, 4), "batch2": (B, 4, 3)},
    "bmm": {"self": (B, 2, 4), "mat2": (B, 4, 3)},
    "mm": {"self": (B, 4), "mat2": (4, 3)},
    "mv": {"self": (B, 4), "vec": (4,)},
    "dot ger outer": {"self": (4,), "tensor": (4,), "vec2": (4,)},
    "linear": {"input": (B, 2, 6), "weight": (5, 6), "bias": (5,)},
    "matmul": {"self": (B, 2, 6), "other": (6, 3)},
    "conv1d": {"input": (B, 4, 6), "weight": (2, 4, 3), "bias": (2,), **equal(1, **CONVOLUTION), "groups": 1},
    "conv2d": {
        **{"input": (B, 4, 6, 6), "weight": (2, 4, 3, 3), "bias": (2,)},
        **equal(2, **CONVOLUTION),
        "groups": 1,
    },
    "conv3d": {
        **{"input": (B, 2, 4, 4, 4), "weight": (2, 2, 3, 3, 3), "bias": (2,)},
        **equal(3, **CONVOLUTION),
        "groups": 1,
    },
    "conv_transpose1d": {
        **{"input": (B, 4, 6), "weight": (4, 2, 3), "bias": (2,), "groups": 1},
        **equal(1, stride=1, padding=0),
    },
    "conv_transpose2d": {"input": (B, 4, 6, 6), "weight": (4, 2, 3, 3), "bias": (2,), "stride": [2, 2], "groups": 1},
    "conv_transpose3d": {
        **{"input": (B, 2, 4, 4, 4), "weight": (2, 2, 3, 3, 3), "bias": (2,), "groups": 1},
        **equal(3, stride=1),
    },
    "convolution": {
        **{"input": (B, 4, 6, 6), "weight": (2, 4, 3, 3), "bias": (2,), "transposed": False, "groups": 1},
        **{"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "output_padding": [0, 0]},
    },
    "embedding": {
        **{"weight": (10, 4), "indices": (B, 3), "padding_idx": -1},
        **{"scale_grad_by_freq": False, "sparse": False},
    },
    "gather scatter scatter_add scatter_reduce": {
        **{"self": (B, 4, 3), "index": (B, 2, 3), "src": (B, 4, 3), "dim": 1, "reduce": "sum"},
    },
    "index_add index_select index_fill": {"self": (B, 4, 3), "index": (2,), "source": (B, 2, 3), "dim": 1},
    "index": {"self": (B, 4), "indices": [(B,)]},
    "index_put": {"self": (B, 4), "indices": [(B,)], "values": (B, 4)},
    "grid_sampler_2d": {
        **{"input": (B, 2, 4, 4), "grid": (B, 3, 3, 2)},
        **{"interpolation_mode": 0, "padding_mode": 1, "align_corners": False},
    },
    "grid_sampler_3d": {
        **{"input": (B, 2, 3, 3, 3), "grid": (B, 2, 2, 2, 3)},
        **{"interpolation_mode": 0, "padding_mode": 1, "align_corners": False},
    },
    "lstm": {"input": (B, 5, 3), "hx": [(1, B, 4), (1, B, 4)], "params": [(16, 3), (16, 4), (16,), (16,)], **RECURRENT},
    "gru": {"input": (B, 5, 3), "hx": (1, B, 4), "params": [(12, 3), (12, 4), (12,), (12,)], **RECURRENT},
    "rnn_tanh rnn_relu": {"input": (B, 5, 3), "hx": (1, B, 4), "params": [(4, 3), (4, 4), (4,), (4,)], **RECURRENT},
    "im2col": {"self": (B, 2, 4, 4), **equal(2, **COLUMNS)},
    "col2im": {"self": (B, 8, 9), "output_size": [4, 4], **equal(2, **COLUMNS)},
    "pixel_shuffle": {"self": (B, 4, 3, 3), "upscale_factor": 2},
    "pixel_unshuffle": {"self": (B, 2, 4, 4), "downscale_factor": 2},
    "one_hot": {"self": (B, 3), "num_classes": 5},
    "reflection_pad1d": {"self": (B, 2, 4), "padding": [1, 2]},
    "reflection_pad2d replication_pad2d": {"self": (B, 2, 4, 4), "padding": [1, 1, 2, 0]},
    "reflection_pad3d replication_pad3d": {"self": (B, 2, 4, 4, 4), "padding": [1, 1, 1, 0, 0, 2]},
    "upsample_bicubic2d upsample_bilinear2d upsample_nearest2d": {
        **{"input": (B, 2, 4, 4), "output_size": [6, 5], "align_corners": False, "scale_factors": None},
    },
    "upsample_linear1d upsample_nearest1d": {
        **{"input": (B, 2, 4), "output_size": [6], "align_corners": False, "scale_factors": None},
    },
    "upsample_nearest3d upsample_trilinear3d": {
        **{"input": (B, 2, 3, 3, 3), "output_size": [4, 4, 2], "align_corners": False, "scale_factors": None},
    },
    "scaled_dot_product_attention": {
        **{"query": (B, 4, 3, 8), "key": (B, 4, 3, 8), "value": (B, 4, 3, 8), "dropout_p": {"float": "0.0"}},
        **{"attn_mask": None, "is_causal": False, "enable_gqa": False},
    },
    "permute": {"self": (B, 4, 3), "dims": [0, 2, 1]},
    "repeat tile": {"self": (B, 4), "repeats": [1, 2], "dims": [1, 2]},
    "roll": {"self": (B, 4), "shifts": [1], "dims": [1]},
    "split_with_sizes split": {"self": (B, 4, 3), "split_sizes": [1, 3], "split_size": 2, "dim": 1},
    "unflatten": {"self": (B, 4), "dim": 1, "sizes": [2, 2]},
    "squeeze frobenius_norm": {"self": (B, 1, 3), "dim": [1], "keepdim": False},
    "std": {"self": (B, 4), "dim": [1]},
    "einsum": {"equation": "ab,bc->ac", "tensors": [(B, 4), (4, 3)]},
    "stack": {"tensors": [(B, 4), (B, 4)], "dim": 1},
    "meshgrid": {"tensors": [(3,), (4,)], "indexing": "ij"},
    "masked_fill": {"self": (B, 4), "mask": (B, 4)},
    "lerp": {"self": (B, 4), "end": (B, 4), "weight": (4,)},
    "select": {"self": (B, 4), "dim": 1, "index": 2},
}
"""Arguments that fit, by operators and parameter: a tuple is the shape of a tensor. Random ones replace some of them."""
FITS = {packet: fits for packets, fits in FITTING.items() for packet in packets.split()}


class Case:
    """A graph with one operator, as JSON."""

    def __init__(self, number: int, seed: int) -> None:
        self.rng = random.Random(f"{seed}/{number}")
        names = sorted(operators.OPERATORS)
        self.target = names[number % len(names)]
        self.rows: list[list[Any]] = []
        self.has_size = False
        rank = self.rng.choice((1, 2, 2, 3, 3, 4, 4, 4, 5, 5))
        self.dims = [self.rng.choice((1, 2, 3, 4, 6)) for _ in range(rank - 1)]
        self.dtype = self.rng.choice(("float32",) * 7 + ("int64", "uint8", "bool", "int32", "bfloat16"))
        self.channels = self.dims[0] if self.dims else 1
        self.fits = FITS.get(self.target.split(".")[1], {}) if self.rng.random() < 0.7 else {}

    def content(self) -> list[Any] | None:
        """The rows of the graph; None if torch computes no tensors from them."""
        schema = operators.find_operator(self.target)._schema
        args, kwargs = [], {}
        for argument in schema.arguments:
            if argument.has_default_value() and argument.name not in self.fits and self.rng.random() < 0.5:
                if argument.kwarg_only:
                    continue
                args.append(_json(argument.default_value))
                continue
            fits = argument.name in self.fits and self.rng.random() < 0.93
            given = self.fits.get(argument.name)
            value = self.fitting(given, argument.name) if fits else self.value(str(argument.type), argument.name)
            if argument.kwarg_only:
                if argument.name not in ("device", "pin_memory", "generator"):
                    kwargs[argument.name] = value
            else:
                args.append(value)
        made = [self.meta(args, kwargs, batch) for batch in BATCHES]
        found = made[0]
        if isinstance(found, Tensor):
            node = ["call", "y", NAMES.get(found.dtype), _shape(made), self.target, args, kwargs]
            return [*self.rows, node, ["output", ["y"]]]
        tensors = [list(each) for each in made]
        if not tensors[0] or any(len(each) != len(tensors[0]) for each in tensors):
            return None
        items = [
            ["item", f"y{index}", NAMES.get(each[0].dtype), _shape(each), "all", index]
            for index, each in enumerate(zip(*tensors, strict=True))
        ]
        return [
            *self.rows,
            ["calls", "all", self.target, args, kwargs],
            *items,
            ["output", [each[1] for each in items]],
        ]

    def meta(self, args: list[Any], kwargs: dict[str, Any], batch: int) -> Any:
        """What the operator computes on tensors without data."""
        device = torch.device("meta")
        values: dict[str, Any] = {}
        for kind, name, *rest in self.rows:
            if kind == "size":
                values[name] = batch
            elif kind == "integer":
                values[name] = operators.INTEGER_OPERATORS[rest[0]](*literal(rest[1], values, device))
            else:
                dims = [batch if dim == "batch" else dim for dim in rest[1]]
                values[name] = torch.empty(dims, dtype=DTYPES[rest[0]], device=device)
        given = {name: literal(value, values, device) for name, value in kwargs.items()}
        operator = operators.find_operator(self.target)
        if "device" in {argument.name for argument in operator._schema.arguments}:
            given["device"] = device
        return operator(*literal(args, values, device), **given)

    def fitting(self, value: Any, name: str) -> Any:
        """An argument of `FITTING`; a number may differ for a batch of three rows."""
        if isinstance(value, tuple):
            return {"value": self.tensor(name, list(value))}
        if isinstance(value, list):
            return [self.fitting(each, name) for each in value]
        if value == "n":
            self.integer(0, always=True)
            return {"value": "n"}
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return self.integer(value) if is_number and self.rng.random() < 0.2 else value

    def value(self, kind: str, name: str) -> Any:
        """An argument of this type."""
        rng = self.rng
        if kind.startswith("Optional["):
            return None if rng.random() < 0.4 else self.value(kind[9:-1], name)
        if kind == "Tensor":
            return {"value": self.tensor(name)}
        if kind.startswith("List["):
            if kind == "List[int]" and rng.random() < 0.4:
                return [self.integer() if rng.random() < 0.1 else dim for dim in [-1, *self.dims]]
            return [self.value(kind[5:-1], name) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4)))]
        if kind == "number":
            kind = rng.choice(("int", "float"))
        if name in ("memory_format", "layout"):
            return None
        if name == "dtype":
            return {"dtype": rng.choice(tuple(DTYPES))}
        if kind == "int":
            return self.integer()
        if kind == "float":
            return {"float": rng.choice(FLOATS)}
        if kind == "bool":
            return rng.random() < 0.5
        return rng.choice(TEXTS) if kind == "str" else None

    def integer(self, value: int | None = None, *, always: bool = False) -> Any:
        """A number; in some cases one that has another value for a batch of three rows, a size that `check_graph` does not check."""
        rng = self.rng
        if value is None:
            small = rng.choice((*range(-1, len(self.dims) + 1), *self.dims, *self.dims))
            value = small if rng.random() < 0.75 else rng.choice(INTEGERS)
        if not always and (rng.random() > 0.25 or abs(value) > 1 << 31):
            return value
        if not self.has_size:
            self.has_size = True
            self.tensor("", ["batch"])
            self.rows += [["size", "n", "batch"], ["integer", "is3", "eq", [{"value": "n"}, 3]]]
        at = len(self.rows)
        self.rows.append(["integer", f"d{at}", "mul", [{"value": "is3"}, rng.choice((1, -1, 3, 4096, -4096, 1 << 40))]])
        self.rows.append(["integer", f"i{at}", "add", [{"value": f"d{at}"}, value]])
        return {"value": f"i{at}"}

    def tensor(self, name: str, shape: list[Any] | None = None) -> str:
        """The name of a new input or weight."""
        rng, made = self.rng, f"t{len(self.rows)}"
        dtype = self.dtype
        if (
            name in ("indices", "index", "boundaries") or self.target == "aten.one_hot.default"
        ) and rng.random() < 0.95:
            dtype = "int64"
        elif name == "mask" and rng.random() < 0.95:
            dtype = "bool"
        elif self.fits and rng.random() < 0.8:
            dtype = "float32"
        elif rng.random() < 0.08:
            dtype = rng.choice(tuple(DTYPES))
        if shape is None:
            if name in ("weight", "bias", "running_mean", "running_var") and rng.random() < 0.8:
                shape = self.weight(name)
            else:
                shape = list(self.dims) if rng.random() < 0.15 else ["batch", *self.dims]
            if shape and rng.random() < 0.15:
                at = rng.randrange(len(shape))
                shape[at] = rng.choice((0, 1, 2, 3, 5, 9))
        if "batch" in shape:
            self.rows.append(["input", made, dtype, shape])
        else:
            self.rows.append(["weight", made, dtype, shape, made])
        return made

    def weight(self, name: str) -> list[Any]:
        """A shape that fits the operators with this parameter."""
        rng, packet, spatial = self.rng, self.target.split(".")[1], max(0, len(self.dims) - 1)
        if name == "weight" and packet.startswith("conv"):
            return [rng.choice((1, 2, 4)), self.channels, *(rng.choice((1, 2, 3)) for _ in range(spatial))]
        if name == "weight" and packet in ("linear", "embedding", "addmm"):
            return [rng.choice((1, 3, 5)), self.dims[-1] if self.dims else 1]
        if packet.endswith("layer_norm") and self.dims:
            return self.dims[-rng.randrange(1, len(self.dims) + 1) :]
        return [self.channels]


def _json(value: Any) -> Any:
    if isinstance(value, float):
        return {"float": str(value)}
    return [_json(item) for item in value] if isinstance(value, list | tuple) else value


def _shape(made: Any) -> list[Any]:
    """The shape of a tensor by its lengths for `BATCHES`."""
    lengths = zip(*(each.shape for each in made), strict=True)
    return ["batch" if each == BATCHES else each[0] if len(set(each)) == 1 else None for each in map(tuple, lengths)]


# -- the process that computes ------------------------------------------------------------------------------------------------


def compute(seed: int, numbers: Iterator[int], guard: int) -> None:
    """Compute cases. Prints one line before each step, and the hash of its results."""
    torch.set_num_threads(1)
    kept = _resident()
    limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + MEMORY_BYTES  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for number in numbers:
        case = Case(number, seed)
        print(number, "check", case.target, flush=True)
        try:
            content = case.content()
            graph = Graph.from_json(json.dumps(content))
            check_graph(graph, [{"batch": batch} for batch in BATCHES])
        except (ModelError, AssertionError, *ERRORS):
            print(number, "refused", case.target, flush=True)
            continue
        print(number, "run", case.target, flush=True)
        print(number, "computed", case.target, results(graph, case.rng, guard), flush=True)
        if number % 500 == 0 and (grown := _resident() - kept) > KEPT_BYTES:
            print(number, "keeps", case.target, grown >> 20, "MiB", flush=True)
            kept += grown
    print(-1, "end", flush=True)


def results(graph: Graph, rng: random.Random, guard: int) -> str:
    """The hash of what the graph computes; "wrote" if it wrote outside of its tensors."""
    digest = hashlib.sha256()
    weights = {
        node.key: _guarded([int(dim or 0) for dim in node.shape], node.dtype, rng, guard) for node in graph.weights
    }
    module = graph.build({key: tensor for key, (_, tensor) in weights.items()}, torch.device("cpu"))
    for batch in COMPUTED:
        inputs = [
            _guarded([batch if dim == "batch" else int(dim or 0) for dim in node.shape], node.dtype, rng, guard)
            for node in graph.inputs
        ]
        before = [whole.clone() for whole, _ in (*inputs, *weights.values())]
        try:
            with torch.inference_mode():
                outputs = module(*(tensor for _, tensor in inputs))
        except ERRORS as error:
            digest.update(type(error).__name__.encode())
        else:
            for each in outputs:
                digest.update(f"{each.dtype}{list(each.shape)}".encode())
                if each.numel() < 1 << 24:
                    digest.update(
                        each.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().data
                    )
        for (whole, _), old in zip((*inputs, *weights.values()), before, strict=True):
            if not torch.equal(whole.view(torch.uint8), old.view(torch.uint8)):
                return "wrote"
    return digest.hexdigest()[:16]


def _guarded(shape: list[int], dtype: str, rng: random.Random, guard: int) -> tuple[Tensor, Tensor]:
    """A tensor with random and extreme values, and the memory around it."""
    of, size = DTYPES[dtype], torch.Size(shape).numel()
    whole = torch.full(
        ((size + 2 * GUARD) * of.itemsize,), guard if of != torch.bool else guard & 1, dtype=torch.uint8
    ).view(of)
    values = torch.Generator().manual_seed(rng.getrandbits(40))
    if of.is_floating_point:
        filled = torch.randn(size, generator=values).to(of)
    elif of == torch.bool:
        filled = torch.rand(size, generator=values) < 0.5
    else:
        filled = torch.randint(0, 4, (size,), generator=values).to(of)
    if size and of != torch.bool:
        for _ in range(rng.choice((0, 0, 1, 3))):
            value = rng.choice(EXTREME[of.is_floating_point])
            if not of.is_floating_point:
                value = max(torch.iinfo(of).min, min(torch.iinfo(of).max, int(value)))
            filled[rng.randrange(size)] = value
    whole[GUARD : GUARD + size] = filled
    return whole, whole[GUARD : GUARD + size].view(shape)


def _resident() -> int:
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()


# -- the process that compares ------------------------------------------------------------------------------------------------


class Twin(threading.Thread):
    """One of the two processes, started again after the case that has ended it."""

    def __init__(self, index: int, arguments: list[str], cases: int, until_s: float) -> None:
        super().__init__()
        self.lines: dict[int, tuple[str, ...]] = {}
        """The last line of each case."""
        self.findings: list[str] = []
        self._index, self._arguments, self._cases, self._until_s = index, arguments, cases, until_s

    def run(self) -> None:
        """Compute all cases."""
        byte, begin = (0x5A, 0xB7)[self._index], 0
        tunables = f"glibc.malloc.perturb={byte}:glibc.malloc.tcache_count=0"
        own = {"MALLOC_PERTURB_": str(byte), "GLIBC_TUNABLES": tunables, "PYTHONWARNINGS": "ignore"}
        while begin < self._cases and time.monotonic() < self._until_s:
            given = [*self._arguments, "--compute", str(begin), "--cases", str(self._cases), "--guard", str(byte)]
            command = [sys.executable, "-m", "tests.torture.bundle_operators", *given]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, env=os.environ | own, stderr=subprocess.DEVNULL
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    number, *rest = line.split()
                    if rest[0] == "keeps":
                        self.findings.append(line.strip())
                    else:
                        self.lines[int(number)] = tuple(rest)
                        begin = max(begin, int(number) + 1)
                    if time.monotonic() > self._until_s:
                        process.kill()
                        return
            if process.returncode:
                step, target = self.lines.get(begin - 1, ("start", ""))[:2]
                code = process.returncode
                how = signal.Signals(-code).name if code < 0 else f"status {code}"
                self.findings.append(f"case {begin - 1}: {target} ended the process with {how} (step: {step})")


def fuzz(
    seed: int, cases: int, minutes: float = 60.0, planted: str = ""
) -> tuple[list[str], Mapping[str, Counter[str]]]:
    """Compute and compare. Returns the findings, and how often each operator was refused or computed."""
    arguments = ["--seed", str(seed), *(["--plant", planted] if planted else [])]
    twins = [Twin(index, arguments, cases, time.monotonic() + 60 * minutes) for index in range(2)]
    for twin in twins:
        twin.start()
    for twin in twins:
        twin.join()
    findings = [text for twin in twins for text in twin.findings]
    counts: dict[str, Counter[str]] = {}
    first, second = (twin.lines for twin in twins)
    for number in sorted(first.keys() & second.keys() - {-1}):
        step, target, *found = first[number]
        counts.setdefault(target, Counter())[step] += 1
        if step == second[number][0] == "computed" and (found != list(second[number][2:]) or found == ["wrote"]):
            findings.append(
                f"case {number}: {target} computes from memory that is not its own ({found} {second[number][2:]})"
            )
    return findings, counts


def main() -> int:
    """Print the findings; return 1 if there are any."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--cases", type=int, default=10_000_000)
    parser.add_argument("--plant", default="", help="an operator that is not allowed")
    parser.add_argument("--compute", type=int, help="internal: compute from this case on")
    parser.add_argument("--guard", type=int, default=0)
    given = parser.parse_args()
    if given.plant:
        operators.OPERATORS = frozenset({given.plant})
    if given.compute is not None:
        compute(given.seed, iter(range(given.compute, given.cases)), given.guard)
        return 0
    findings, counts = fuzz(given.seed, given.cases, given.minutes, given.plant)
    print(*findings, sep="\n")
    total: Counter[str] = sum(counts.values(), Counter())
    never = sorted(target for target, count in counts.items() if not count["computed"])
    print(
        f"{sum(total.values())} cases: {dict(total)}; {len(findings)} findings; never computed: {' '.join(never) or 'none'}"
    )
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
