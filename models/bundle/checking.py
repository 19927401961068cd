"""Checks a graph before anything of it is computed: the arguments of each operator, and all shapes and dtypes, on tensors without data.

`check_in_child` runs the check in a process of its own. A graph that crashes a kernel or exhausts the memory ends only that process.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn

import torch
import torch.fx.experimental.symbolic_shapes  # operators on tensors without data import it; forks share its 40 MB
from torch import Tensor, fx

from multiworld_serving.models.bundle.graph import Graph
from multiworld_serving.models.bundle.nodes import BATCH, DTYPES, Call, Calls, TensorNode
from multiworld_serving.models.bundle.rows import MAX_COMPUTED_BYTES
from multiworld_serving.models.bundle.signatures import check_call, expect_shapes
from multiworld_serving.models.errors import BundleError

MAX_TENSOR_BYTES = 8 << 30
"""Largest tensor that a graph may compute."""
_DEADLINE_S = 300
"""Longest time of a check. Large graphs take seconds."""
_MEMORY_BYTES = 4 << 30
"""What a check may allocate."""
_MAX_REPLY_BYTES = 1 << 16


def check_graph(graph: Graph, lengths: Sequence[Mapping[str, int]]) -> None:
    """Check a graph without computing it and without its weights.

    Args:
        lengths: lengths of the variable dimensions for which the shapes are checked; normally the least and the largest.
    Raises:
        BundleError: an operator has arguments that it does not take, a tensor would have another shape or dtype than its node says or
            more than `MAX_TENSOR_BYTES`.
    """
    for node in graph.nodes:
        if isinstance(node, Call | Calls):
            check_call(node, graph.by_name)
    module = graph.build({node.key: node.empty() for node in graph.weights}, torch.device("meta"))
    for each in lengths:
        _check_shapes(graph, module, each)


def _check_shapes(graph: Graph, module: fx.GraphModule, lengths: Mapping[str, int]) -> None:
    found: dict[str, Any] = {}
    values = values_of(module, [node.empty(lengths) for node in graph.inputs])
    for node in graph.nodes:
        try:
            found[node.name] = next(values)
        except Exception as error:  # operators raise many types
            lines = str(error).splitlines() or [""]
            raise BundleError(f"invalid graph: {node.name!r} cannot be computed ({lines[0][:200]})") from error
        if isinstance(node, TensorNode):
            _compare(node, found[node.name], lengths)
    for name in graph.outputs:
        size = found[name].nbytes
        if None in graph.tensor(name).shape and size > MAX_COMPUTED_BYTES * lengths[BATCH]:
            raise BundleError(
                f"a row of the output {name!r} has {size // lengths[BATCH]} bytes; at most "
                f"{MAX_COMPUTED_BYTES} are possible with a computed dimension"
            )


def _compare(node: TensorNode, value: Any, lengths: Mapping[str, int]) -> None:
    expected = [lengths.get(dim, -1) if isinstance(dim, str) else dim for dim in node.shape]
    found = list(value.shape) if isinstance(value, Tensor) else None
    same = (
        found is not None
        and len(found) == len(expected)
        and all(dim in (None, length) for dim, length in zip(expected, found, strict=True))
    )
    if not same or value.dtype != DTYPES[node.dtype]:
        what = f"{value.dtype} {found}" if found is not None else type(value).__name__
        raise BundleError(f"invalid graph: {node.name!r} is {what}; expected {node.dtype} {list(node.shape)}")
    if value.nbytes > MAX_TENSOR_BYTES:
        raise BundleError(f"invalid graph: {node.name!r} has more than {MAX_TENSOR_BYTES >> 30} GiB")


def values_of(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Iterator[Any]:
    """Compute the nodes of a graph in order: on tensors without data, if those of the module and the inputs have none.

    Computes `expect_shapes`, too, but yields nothing for it.

    Raises whatever operators raise.
    """
    interpreter = fx.Interpreter(module)
    interpreter.args_iter = iter(inputs)
    for node in module.graph.nodes:
        if node.op != "output":
            with torch.no_grad():
                interpreter.env[node] = interpreter.run_node(node)
            if node.target is not expect_shapes:
                yield interpreter.env[node]


def check_in_child(check: Callable[[], None], *, deadline_s: float = _DEADLINE_S) -> None:
    """Run `check` in a forked process with limits for memory and time. Blocks until it has ended.

    Raises:
        BundleError: the check has raised an exception, has exceeded a limit, or a signal has ended its process.
    """
    read_fd, write_fd = os.pipe()
    with warnings.catch_warnings():
        # Of threads: the check computes on tensors without data, for which torch starts no thread and takes no lock for long.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        _run(check, write_fd)
    os.close(write_fd)
    try:
        reply = _read(read_fd, time.monotonic() + deadline_s)
    finally:
        os.close(read_fd)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if reply is None:
        raise BundleError(
            f"invalid graph: it cannot be checked within {deadline_s:g} s; split the model, or export it again"
        )
    if status > 0:
        raise BundleError(reply.decode(errors="replace"))
    if reply != b"ok":
        name = signal.Signals(-status).name if status else "no reply"
        raise BundleError(f"invalid graph: the process that checked it ended with {name}; export the model again")


def _read(fd: int, deadline_s: float) -> bytes | None:
    """What the process writes until it closes the pipe; None if it does not in time."""
    reply, poll = b"", select.poll()
    poll.register(fd, select.POLLIN)
    while len(reply) < _MAX_REPLY_BYTES:
        if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            return None
        if not (found := os.read(fd, _MAX_REPLY_BYTES)):
            break
        reply += found
    return reply


def _run(check: Callable[[], None], write_fd: int) -> NoReturn:
    """The forked process."""
    status, reply = 1, b"the check has ended without a result"
    try:
        faulthandler.disable()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + _MEMORY_BYTES)
        _limit(resource.RLIMIT_CPU, _DEADLINE_S)
        _limit(resource.RLIMIT_CORE, 0)
        check()
        status, reply = 0, b"ok"
    except BundleError as error:
        reply = str(error).encode()
    except MemoryError:
        reply = b"invalid graph: checking it takes more than 4 GiB of memory"
    except BaseException as error:  # noqa: BLE001 - the process ends here
        reply = f"invalid graph: it cannot be checked ({type(error).__name__}: {str(error)[:200]})".encode()
    finally:
        with suppress(OSError):
            os.write(write_fd, reply[:_MAX_REPLY_BYTES])
        os._exit(status)


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _exclude_from_compiling(function: Any) -> None:
    """Set the attribute by which torch excludes a function and the functions that it wraps from its compiler.

    Without it, torch sets the attribute at the first call on a meta tensor. It imports the compiler for that: two seconds of CPU time.
    """
    for cell in getattr(function, "__closure__", None) or ():
        inner = cell.cell_contents
        if isinstance(inner, FunctionType) and not hasattr(inner, "__dynamo_disable"):
            setattr(inner, "__dynamo_disable", inner)
            _exclude_from_compiling(inner)


for _module in (torch._refs, torch._refs.nn.functional, torch._refs.linalg, torch._decomp.decompositions):
    for _function in vars(_module).values():
        _exclude_from_compiling(_function)
