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
GROUPS = {"operators": OPERATORS, "arguments": ARGUMENTS, "order": ORDER, "shapes": SHAPES, "integers": INTEGERS}
HOSTILE = {f"{group}: {name}": content for group, cases in GROUPS.items() for name, content in cases.items()}
