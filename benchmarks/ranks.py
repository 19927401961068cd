"""Processes and tables for the benchmarks of the library. Processes are forked from a fork server that has imported torch."""

import contextlib
import multiprocessing
import multiprocessing.process
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import torch
import uvloop

Main = Callable[..., Coroutine[Any, Any, None]]
"""The coroutine function that a process runs. It must be at module level, so that it can be pickled."""


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine with one torch thread on uvloop."""
    torch.set_num_threads(1)
    uvloop.run(coroutine)


def _run(main: Main, *arguments: Any) -> None:
    run(main(*arguments))


def context() -> multiprocessing.context.ForkServerContext:
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch", "multiworld"])
    return server


def start(main: Main, *arguments: Any) -> multiprocessing.process.BaseProcess:
    """Start a process that runs `main(*arguments)`."""
    process = context().Process(target=_run, args=(main, *arguments), daemon=True)
    process.start()
    return process


@contextlib.contextmanager
def started(main: Main, ranks: Sequence[int], *arguments: Any) -> Iterator[list[multiprocessing.process.BaseProcess]]:
    """Run `main(rank, *arguments)` in one process per rank. After the block, waits up to 30 s for each process, then kills it."""
    processes = [start(main, rank, *arguments) for rank in ranks]
    try:
        yield processes
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            process.kill()
            process.join()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table as Markdown."""
    texts = [list(map(str, columns)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(row[index]) for row in texts) for index in range(len(columns))]
    print(f"\n{title}\n")
    for number, row in enumerate(texts):
        print("| " + " | ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
