"""Runs the ranks of an example as child processes and prints their output."""

import io
import itertools
import multiprocessing
import os
import runpy
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import TextIO

COLOURS = (36, 33, 32, 35, 34, 31)

_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class Rank:
    """A process to start.

    Attributes:
        label: name in the output.
        places: its (world, rank) pairs.
        module: module to run, with `arguments`.
        survives: whether it continues when another member of its worlds is killed.
    """

    label: str
    places: tuple[tuple[int, int], ...]
    module: str
    arguments: tuple[str, ...]
    survives: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to inject.

    Attributes:
        victim: the rank to kill.
        after_step: the step after which it is killed; a rank that survives faults is killed in the middle of that step.
        restart_after_s: seconds after the kill when it is started again; None for never.
    """

    victim: Rank
    after_step: int
    restart_after_s: float | None = None

    @property
    def kill_on_output(self) -> str:
        """The output at which the victim is killed: in the middle of the step if the ranks survive faults, otherwise at its end."""
        return f"{'in the middle of' if self.victim.survives else 'done with'} step: {self.after_step} "

    def excuses(self, rank: Rank) -> bool:
        """Return whether `rank` must fail: all its worlds are worlds of the victim, and it does not survive the fault."""
        if not rank.places or (rank.survives and rank != self.victim):
            return False
        return {index for index, _ in rank.places} <= {index for index, _ in self.victim.places}


class Terminal:
    """Prints lines prefixed with a name; in colour if the output is a terminal."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._width = max(map(len, labels))
        coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._colours = dict(zip(labels, itertools.cycle(COLOURS), strict=False)) if coloured else {}

    def print(self, label: str, text: str) -> None:
        name = f"{label:<{self._width}} |"
        colour = self._colours.get(label)
        print(f"\033[{colour}m{name}\033[0m {text}" if colour else f"{name} {text}", flush=True)


@dataclass(slots=True, eq=False)
class Stream:
    """The read end of a pipe to which a rank writes lines.

    Attributes:
        pipe: file descriptor.
        partial: the incomplete last line.
        ended: whether the end of the data is reached; `pipe` is closed then.
    """

    pipe: int
    partial: bytes = b""
    ended: bool = False

    def read(self) -> list[str]:
        """Return the lines that have arrived. Blocks while there is no data."""
        data = os.read(self.pipe, 1 << 16)
        *lines, self.partial = (self.partial + data).split(b"\n")
        if not data:
            self.ended = True
            os.close(self.pipe)
            lines += [self.partial] if self.partial else []
        return [line.decode(errors="replace") for line in lines]


@dataclass(frozen=True, eq=False)
class Running:
    """A started rank and its open streams.

    Output and errors are separate streams, because torch writes errors in several pieces, and lines of output could come between them.
    """

    rank: Rank
    process: BaseProcess
    streams: list[Stream]


class Runner:
    """Runs all ranks of an example. Single-threaded, because it forks.

    Attributes:
        failed: whether a rank failed that the fault does not excuse.
    """

    def __init__(self, terminal: Terminal, arguments: Sequence[str], fault: Fault | None) -> None:
        self.failed = False
        self._terminal = terminal
        self._arguments = tuple(arguments)
        self._fault = fault
        self._running: list[Running] = []
        self._selector = selectors.DefaultSelector()
        self._restart_at_s: float | None = None

    def run(self, ranks: Sequence[Rank]) -> None:
        """Start all ranks and wait until all have ended. If this is interrupted, kill the ranks that still run."""
        try:
            for rank in ranks:
                fault = self._fault
                self._start(rank, fault.kill_on_output if fault is not None and rank == fault.victim else "")
            while self._running or self._restart_at_s is not None:
                for key, _ in self._selector.select(self._restart_when_due()):
                    self._read_stream(*key.data)
        finally:
            self._kill_all()

    def _start(self, rank: Rank, kill_on_output: str = "") -> None:
        pipes = os.pipe(), os.pipe()
        theirs = tuple(write_end for _, write_end in pipes)
        streams = [Stream(read_end) for read_end, _ in pipes]
        arguments = (*rank.arguments, *self._arguments)
        ours = [
            stream.pipe for stream in (*streams, *(stream for running in self._running for stream in running.streams))
        ]
        process = _fork.Process(
            target=_run_rank, args=(rank.module, arguments, theirs, ours, kill_on_output), daemon=True
        )
        process.start()
        running = Running(rank, process, streams)
        self._running.append(running)
        for stream, write_end in zip(streams, theirs, strict=True):
            os.close(write_end)
            self._selector.register(stream.pipe, selectors.EVENT_READ, (running, stream))
        command = " ".join(("python -m", rank.module, *arguments))
        self._terminal.print(rank.label, f"started as process {process.pid}: {command}")

    def _read_stream(self, running: Running, stream: Stream) -> None:
        for line in stream.read():
            self._terminal.print(running.rank.label, line)
        if stream.ended:
            self._selector.unregister(stream.pipe)
            running.streams.remove(stream)
        if not running.streams:
            self._running.remove(running)
            running.process.join()
            self._on_ended(running.rank, running.process.exitcode or 0)

    def _on_ended(self, rank: Rank, status: int) -> None:
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        self._terminal.print(rank.label, how)
        fault = self._fault
        if (
            fault is not None
            and rank == fault.victim
            and status == -signal.SIGKILL
            and fault.restart_after_s is not None
        ):
            self._restart_at_s = time.monotonic() + fault.restart_after_s
        self.failed |= status != 0 and not (fault is not None and fault.excuses(rank))

    def _restart_when_due(self) -> float | None:
        """Restart the victim when it is due. Returns the seconds until then; None if no restart is pending."""
        if self._restart_at_s is None or self._fault is None:
            return None
        left_s = self._restart_at_s - time.monotonic()
        if left_s > 0:
            return left_s
        self._restart_at_s = None
        self._start(self._fault.victim)
        return None

    def _kill_all(self) -> None:
        for running in self._running:
            running.process.kill()
        for running in self._running:
            running.process.join()
            for stream in running.streams:
                os.close(stream.pipe)
        self._selector.close()


# -- in the child ------------------------------------------------------------------------------------------------------------


class KillOnOutput(io.TextIOBase):
    """Standard output that kills the process when it has written `words`, before any further code runs."""

    def __init__(self, stream: TextIO, words: str) -> None:
        self._stream = stream
        self._words = words

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        if self._words in f"{text} ":
            self._stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    def flush(self) -> None:
        self._stream.flush()


def _run_rank(
    module: str, arguments: Sequence[str], ends: Sequence[int], inherited: Sequence[int], kill_on_output: str
) -> None:
    """Run `python -m module arguments` in this child process, with output and errors redirected to two pipes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for fd in inherited:  # otherwise this process would not notice the end of the launcher
        os.close(fd)
    for fd, end in zip((1, 2), ends, strict=True):
        os.dup2(end, fd)
        os.close(end)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    if kill_on_output:
        sys.stdout = KillOnOutput(sys.stdout, kill_on_output)
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)  # the launcher imported it to load its imports before the fork
    runpy.run_module(module, run_name="__main__")
