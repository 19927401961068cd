"""Processes for the library's benchmarks: rank 0 is the script itself, the others are forked from a server that has imported torch."""

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
"""What a rank does: called with its rank, a port, and what else was given. A module-level function."""


LOOPS = ("uvloop", "asyncio")


def run(loop: str, coroutine: Coroutine[Any, Any, None]) -> None:
    """Run it on an event loop of that kind, with one thread for torch."""
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
    """Run `main(*arguments)` in a process of its own."""
    process = context().Process(target=_run, args=(loop, main, *arguments), daemon=True)
    process.start()
    return process


@contextlib.contextmanager
def started(
    loop: str, main: Main, ranks: Sequence[int], *arguments: Any
) -> Iterator[list[multiprocessing.process.BaseProcess]]:
    """Run `main(rank, *arguments)` for each rank; all of them are gone afterwards."""
    processes = [start(loop, main, rank, *arguments) for rank in ranks]
    try:
        yield processes
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            process.kill()
            process.join()


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: Sequence[float]) -> str:
    """`median (lowest to highest)` of a few runs."""
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table in Markdown."""
    texts = [list(map(str, columns)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(row[index]) for row in texts) for index in range(len(columns))]
    print(f"\n{title}\n")
    for number, row in enumerate(texts):
        print("| " + " | ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
