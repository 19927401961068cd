"""Graphs that no exporter writes, by what is wrong with them."""

from typing import Any

IMAGE: list[Any] = ["batch", 4, 6, 6]


def rows() -> list[Any]:
    """A graph with every kind of row."""
    norm = [{"value": name} for name in ("x", "scale", "shift", "mean", "var")]
    return [
        ["input", "x", "float32", IMAGE],
        *(["weight", name, "float32", [4], name] for name in ("scale", "shift", "mean", "var")),
        ["size", "rows", "batch"],
        ["integer", "half", "mul", [{"value": "rows"}, 2]],
        [
            *("calls", "norm", "aten._native_batch_norm_legit_no_training.default"),
            *([*norm, {"float": "0.1"}, {"float": "1e-05"}], {}),
        ],
        ["item", "y", "float32", IMAGE, "norm", 0],
        [
            "call",
            "z",
            "float32",
            [None, 2, 6, 6],
            "aten.view.default",
            [{"value": "y"}, [{"value": "half"}, 2, 6, 6]],
            {},
        ],
        ["call", "s", "float32", ["batch", 144], "aten.view.default", [{"value": "z"}, [{"value": "rows"}, 144]], {}],
        ["call", "p", "float32", ["batch", 144], "aten.softmax.int", [{"value": "s"}, 1], {"dtype": None}],
        ["output", ["p"]],
    ]


def call(
    operator: str, args: list[Any], kwargs: dict[str, Any] | None = None, shape: list[Any] | None = None
) -> list[Any]:
    return [
        ["input", "x", "float32", IMAGE],
        ["size", "rows", "batch"],
        ["call", "y", "float32", IMAGE if shape is None else shape, operator, args, kwargs or {}],
        ["output", ["y"]],
    ]


def integer(operator: str, args: list[Any], times: int = 1) -> list[Any]:
    made: list[Any] = [["input", "x", "float32", IMAGE], ["size", "n0", "batch"]]
    for number in range(times):
        made.append(["integer", f"n{number + 1}", operator, args or [{"value": f"n{number}"}] * 2])
    return [*made, ["output", ["x"]]]


X = {"value": "x"}
OPERATORS = {
    "unknown operator": call("aten.no_such_operator.default", [X]),
    "operator that is not allowed": call("aten.from_file.default", ["/etc/passwd"]),
    "module": call("os.system.default", ["id"]),
    "enormous name": call("aten." + "a" * 100_000 + ".default", [X]),
}
ARGUMENTS = {
    "unknown argument": call("aten.relu.default", [X], {"inplace": True}),
    "argument that is code": call("aten.relu.default", [X], {"x=__import__('os')": 1}),
    "argument twice": call("aten.add.Tensor", [X, X], {"other": X}),
    "too many arguments": call("aten.relu.default", [X, X, X]),
    "too few arguments": call("aten.add.Tensor", [X]),
    "enormous integer": call("aten.sum.dim_IntList", [X, [1 << 70]]),
    "unknown literal": call("aten.relu.default", [{"eval": "1"}]),
    "element type by attribute": call("aten.zeros_like.default", [X], {"dtype": {"dtype": "ops"}}),
    "float as JSON": call("aten.add.Scalar", [X, 0.5]),
}
ORDER = {
    "cycle": [
        ["input", "x", "float32", IMAGE],
        ["call", "a", "float32", IMAGE, "aten.add.Tensor", [{"value": "b"}, X], {}],
        ["call", "b", "float32", IMAGE, "aten.add.Tensor", [{"value": "a"}, X], {}],
        ["output", ["b"]],
    ],
    "value of its own": call("aten.relu.default", [{"value": "y"}]),
    "name twice": [*rows()[:2], rows()[1], *rows()[2:]],
    "output that is not computed": [*rows()[:-1], ["output", ["nothing"]]],
    "no rows": [],
    "enormous count": [["input", f"x{number}", "float32", IMAGE] for number in range(200_000)],
    "unknown dimension": [["input", "x", "float32", ["other", 4]], ["output", ["x"]]],
    "dimension of no input": [*rows()[:2], ["size", "n", "other"], *rows()[2:]],
    "name with code": [["input", "x): import os #", "float32", IMAGE], ["output", ["x): import os #"]]],
    "item of a tensor": [
        ["input", "x", "float32", IMAGE],
        ["item", "y", "float32", [4, 6, 6], "x", 0],
        ["output", ["y"]],
    ],
    "item out of range": [*rows()[:8], ["item", "y", "float32", IMAGE, "norm", 3000], ["output", ["y"]]],
    "weight of variable length": [
        ["input", "x", "float32", IMAGE],
        ["weight", "w", "float32", IMAGE, "w"],
        ["output", ["w"]],
    ],
}
SHAPES = {
    "wrong shape": call("aten.relu.default", [X], shape=["batch", 4, 6, 7]),
    "wrong rank": call("aten.relu.default", [X], shape=["batch", 4]),
    "wrong element type": call("aten.eq.Tensor", [X, X]),
    "several tensors as one": call("aten.max.dim", [X, 1]),
    "negative dimension": call("aten.relu.default", [X], shape=["batch", -4, 6, 6]),
    "enormous dimension": call("aten.relu.default", [X], shape=["batch", 1 << 50, 6, 6]),
    "terabytes": call("aten.ones.default", [[1 << 39, 16]], shape=[1 << 39, 16]),
    "overflow of a size": call("aten.ones.default", [[1 << 39, 1 << 39]], shape=[1 << 39, 1 << 39]),
    "weights of batch norm that are too short": [
        row if row[:2] != ["weight", "mean"] else ["weight", "mean", "float32", [1], "mean"] for row in rows()
    ],
}
INTEGERS = {
    "enormous power": integer("pow", [10, 1 << 61]),
    "repeated squaring": integer("mul", [], times=100),
    "large exponent": integer("pow", [{"value": "n0"}, 100]),
    "tensor": integer("mul", [X, 2]),
    "unknown": integer("__import__", [1, 2]),
}
SEQUENCE: list[Any] = ["batch", 5, 3]


def lstm(
    *, bias: int = 16, states: Any = None, dropout: str = "0.0", train: bool = False, operator: str = "lstm.input"
) -> list[Any]:
    """An LSTM of 3 features and a state of 4, whose arguments are valid without arguments."""
    shapes = {"w": [16, 3], "u": [16, 4], "b": [bias], "c": [16]}
    states = [{"value": "h"}, {"value": "h"}] if states is None else states
    flags = [True, 1, {"float": dropout}, train, False, True]
    return [
        ["input", "x", "float32", SEQUENCE],
        ["input", "h", "float32", [1, "batch", 4]],
        *(["weight", name, "float32", shape, name] for name, shape in shapes.items()),
        ["calls", "all", f"aten.{operator}", [X, states, [{"value": name} for name in shapes], *flags], {}],
        ["item", "y", "float32", ["batch", 5, 4], "all", 0],
        ["output", ["y"]],
    ]


def sampler(mode: Any, padding: Any = 0) -> list[Any]:
    args = [X, {"value": "g"}, mode, padding, False]
    return [
        ["input", "x", "float32", ["batch", 1, 2, 2, 2]],
        ["input", "g", "float32", ["batch", 2, 2, 2, 3]],
        ["call", "y", "float32", ["batch", 1, 2, 2, 2], "aten.grid_sampler_3d.default", args, {}],
        ["output", ["y"]],
    ]


def attention(kwargs: dict[str, Any], heads: int = 2) -> list[Any]:
    return [
        ["input", "x", "float32", ["batch", 4, 3, 8]],
        ["input", "k", "float32", ["batch", heads, 3, 8]],
        [
            *("call", "y", "float32", ["batch", 4, 3, 8], "aten.scaled_dot_product_attention.default"),
            *([X, {"value": "k"}, {"value": "k"}], kwargs),
        ],
        ["output", ["y"]],
    ]


KERNELS = {
    "short bias of an LSTM": lstm(bias=1),
    "one state of an LSTM": lstm(states=[{"value": "h"}]),
    "states of an LSTM that are no list": lstm(states={"value": "h"}),
    "LSTM with dropout": lstm(dropout="0.5"),
    "LSTM in training": lstm(train=True),
    "weights of an LSTM for a GRU": lstm(states={"value": "h"}, operator="gru.input"),
    "interpolation that does not exist": sampler(7),
    "interpolation by the batch": [*sampler({"value": "n"})[:2], ["size", "n", "batch"], *sampler({"value": "n"})[2:]],
    "padding that does not exist": sampler(0, 9),
    "attention with dropout": attention({"dropout_p": {"float": "0.5"}}),
    "window that depends on the batch": [
        *(
            ["input", "x", "float32", ["batch", 3, 6]],
            ["size", "n", "batch"],
            ["integer", "is3", "eq", [{"value": "n"}, 3]],
        ),
        ["integer", "more", "mul", [{"value": "is3"}, 1 << 40]],
        ["integer", "k", "add", [{"value": "more"}, 2]],
        [
            *("call", "y", "float32", ["batch", 3, 3], "aten.max_pool1d.default"),
            *([X, [{"value": "k"}], [2], [0], [1], True], {}),
        ],
        ["output", ["y"]],
    ],
    "weights that change": [
        *(["input", "x", "float32", IMAGE], ["weight", "m", "float32", [4], "m"]),
        [
            *("call", "y", "float32", IMAGE, "aten.instance_norm.default"),
            *([X, None, None, {"value": "m"}, {"value": "m"}, True, {"float": "0.1"}, {"float": "1e-05"}, False], {}),
        ],
        ["output", ["y"]],
    ],
    "number for a memory format": call("aten.zeros_like.default", [X], {"memory_format": -1}),
    "number for an element type": call("aten.to.dtype", [X, 99]),
    "attention without key heads": attention({"enable_gqa": True}, heads=0),
}
GROUPS = {
    "kernels": KERNELS,
    "operators": OPERATORS,
    "arguments": ARGUMENTS,
    "order": ORDER,
    "shapes": SHAPES,
    "integers": INTEGERS,
}
HOSTILE = {f"{group}: {name}": content for group, cases in GROUPS.items() for name, content in cases.items()}
