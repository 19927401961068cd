"""Processes and tables for the benchmarks of the library. Processes are forked from a fork server that has imported torch."""

import asyncio
import contextlib
import multiprocessing
import multiprocessing.process
import statistics
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import torch
import uvloop

Main = Callable[..., Coroutine[Any, Any, None]]
"""The coroutine function that a process runs. It must be at module level, so that it can be pickled."""


LOOPS = ("uvloop", "asyncio")


def run(loop: str, coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine with one torch thread, on uvloop if `loop` is "uvloop", else on asyncio's event loop."""
    torch.set_num_threads(1)
    if loop == "uvloop":
        uvloop.run(coroutine)
    else:
        asyncio.run(coroutine)


def _run(loop: str, main: Main, *arguments: Any) -> None:
    run(loop, main(*arguments))


def context() -> multiprocessing.context.ForkServerContext:
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch", "multiworld"])
    return server


def start(loop: str, main: Main, *arguments: Any) -> multiprocessing.process.BaseProcess:
    """Start a process that runs `main(*arguments)`."""
    process = context().Process(target=_run, args=(loop, main, *arguments), daemon=True)
    process.start()
    return process


@contextlib.contextmanager
def started(
    loop: str, main: Main, ranks: Sequence[int], *arguments: Any
) -> Iterator[list[multiprocessing.process.BaseProcess]]:
    """Run `main(rank, *arguments)` in one process per rank. After the block, waits up to 30 s for each process, then kills it."""
    processes = [start(loop, main, rank, *arguments) for rank in ranks]
    try:
        yield processes
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            process.kill()
            process.join()


def spread(values: Sequence[float]) -> str:
    """The values as text: `median (lowest to highest)`."""
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table as Markdown."""
    texts = [list(map(str, columns)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(row[index]) for row in texts) for index in range(len(columns))]
    print(f"\n{title}\n")
    for number, row in enumerate(texts):
        print("| " + " | ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
