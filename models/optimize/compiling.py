"""Compiles stages ahead of time with AOTInductor and caches them on disk. Loading takes a fraction of a second.

Compiling takes minutes and cannot be interrupted, so a child process does it (`python -m multiworld_serving.models.optimize`) while the
worker serves. Its result is a folder with one AOTInductor package per batch size. Weights are frozen into the code; the folder's name is
a hash of everything that the code depends on. The same process compares the code with what the worker computes otherwise, and keeps
it only if it is faster.
"""

import hashlib
import json
import os
import shlex
import shutil
import signal
import stat
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
import torch._inductor
from torch import Tensor

from multiworld_serving.models.bundle.stage import BundleStage, BundleStageSpec, load_bundle_stage
from multiworld_serving.models.errors import ModelError
from multiworld_serving.models.optimize.execution_modes import ExecutionMode, StagePrecision, cpuinfo_lines
from multiworld_serving.models.optimize.folding import FoldedStage
from multiworld_serving.models.optimize.fusing import Workload
from multiworld_serving.models.optimize.padded_stage import PaddedStage, batch_sizes
from multiworld_serving.models.optimize.selection import compare
from multiworld_serving.models.optimize.unpacking import page_out, unpack_under

MAX_CACHE_BYTES = 8 << 30
"""Limit of the cache; the least recently used packages are removed first."""
UNAVAILABLE = 3
"""Exit status of the compile process if this machine cannot compile any stage."""
_REQUEST, _WEIGHTS = "request.json", "weights.safetensors"
_SLOWER = "slower.txt"
"""Instead of packages: why they are not used."""
_ALIGNED_MALLOC = """#ifdef __cplusplus
#include <cstdlib>
#include <malloc.h>
inline void* multiworld_aligned_malloc(std::size_t bytes) { return std::aligned_alloc(64, (bytes + 63) / 64 * 64); }
namespace std { using ::multiworld_aligned_malloc; }
#define malloc multiworld_aligned_malloc
#endif
"""
"""AOTInductor copies weights to memory from malloc, which begins 16 bytes after a cache line if it is large. oneDNN then reads two cache
lines for each row of a tile: ResNet-50 in bfloat16 takes 1.6 times as long with AMX."""
_MEASURE_S = 120.0
"""Longest time for comparing compiled code. """
_UNPACKED = "unpacked"
_GROUP_NICE = 10
"""Of the session of the compile process: a tenth of what a busy worker gets, so that compiling ends on a busy machine, too."""


class CompileError(ModelError):
    """A stage cannot be compiled or its code cannot be loaded. The message is one line."""


@dataclass(frozen=True)
class CompileRequest:
    """A stage to compile.

    Attributes:
        sample_shape: shape of one sample of the stage's input.
        max_batch_size: largest batch size.
        precision: precision of the blocks, as in `ExecutionMode`.
        threads: numbers of threads that may compute a batch. They decide whether compiled code is faster.
        weights: the stage's parameters and buffers as a safetensors file.
    """

    spec: BundleStageSpec
    sample_shape: tuple[int, ...]
    max_batch_size: int
    precision: StagePrecision
    threads: tuple[int, ...]
    weights: bytearray

    @property
    def key(self) -> str:
        """Cache key: a hash of spec, shapes, precision, threads, weights, torch version and processor."""
        # The code may use the whole instruction set.
        processor = sorted(set(cpuinfo_lines("model name", "flags", "features")))
        text = json.dumps(
            [
                *(self.spec.to_json(), self.sample_shape, self.max_batch_size, self.precision, self.threads),
                *(torch.__version__, processor),
            ]
        )
        return hashlib.sha256(text.encode() + hashlib.sha256(self.weights).digest()).hexdigest()[:32]

    def write(self, folder: Path) -> None:
        """Write to a folder, for `read` in another process. Raises OSError."""
        names = ("sample_shape", "max_batch_size", "precision", "threads")
        fields = {name: getattr(self, name) for name in names}
        (folder / _REQUEST).write_text(json.dumps({"spec": self.spec.to_json(), **fields}))
        (folder / _WEIGHTS).write_bytes(self.weights)

    @classmethod
    def read(cls, folder: Path) -> "CompileRequest":
        """Read what `write` has written. Raises OSError, StageError."""
        fields = json.loads((folder / _REQUEST).read_text())
        shape, threads = tuple(fields["sample_shape"]), tuple(fields["threads"])
        weights = bytearray((folder / _WEIGHTS).read_bytes())
        spec = BundleStageSpec.from_json(fields["spec"])
        return cls(spec, shape, fields["max_batch_size"], fields["precision"], threads, weights)


class CompiledStageCache:
    """Compiled stages on disk, shared by all processes of the machine.

    Args:
        folder: by default `$XDG_CACHE_HOME/multiworld/compiled` or `~/.cache/multiworld/compiled`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        # Not Path.home(), which raises for a user without a home directory.
        cache = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or tempfile.gettempdir()) / ".cache"
        self.folder = folder or Path(cache) / "multiworld" / "compiled"

    def load(self, request: CompileRequest) -> PaddedStage | None:
        """The compiled stage; None if it is not in the cache, or was slower. Raises CompileError if it cannot be loaded."""
        found = self.folder / request.key
        if not found.is_dir() or self.slower(request):
            return None
        _check_owner(self.folder)
        try:
            os.utime(found)
            return self._load_packages(request, found)
        except (OSError, RuntimeError) as error:
            self._discard(found)  # so that it is compiled again
            raise CompileError(f"{found} cannot be loaded: {_first_line(error)}") from error

    def slower(self, request: CompileRequest) -> str:
        """Why the compiled stage is not used, with the times that were measured. Empty if it is used or was not compiled."""
        try:
            return (self.folder / request.key / _SLOWER).read_text()
        except OSError:
            return ""

    def compile(self, request: CompileRequest) -> None:
        """Compile the packages and measure them. The caller holds the lock (`open_lock`) and has found that `is_done` is false.

        If they are not faster, only the measurement is kept; see `slower`.

        Takes minutes and can be interrupted only by ending the process. Raises CompileError, OSError.
        """
        self._make_folder()
        made = self.folder / request.key
        stage = load_bundle_stage(request.spec, request.weights)
        with (
            tempfile.TemporaryDirectory(prefix="making-", dir=self.folder) as making,
            tempfile.TemporaryDirectory(prefix="making-", dir=self.folder) as tools,
        ):
            compiler = _aligning_compiler(Path(tools))
            for batch_size in batch_sizes(request.max_batch_size):
                _make_package(stage, request, batch_size, Path(making) / f"{batch_size}.pt2", compiler)
            self._measure(stage, request, Path(making))
            Path(making).rename(made)
            Path(making).mkdir()  # TemporaryDirectory removes it
        self._evict(made)

    def is_done(self, request: CompileRequest) -> bool:
        """Whether this stage was compiled and measured."""
        return (self.folder / request.key).is_dir()

    def package_bytes(self, request: CompileRequest) -> int:
        """Memory that `load` needs at least."""
        return sum(file.stat().st_size for file in (self.folder / request.key).glob("*.pt2"))

    def open_lock(self) -> IO[str]:
        """The file to lock with `flock`, so that only one process of the machine compiles. The kernel unlocks it for a dead process.

        Raises CompileError, OSError.
        """
        self._make_folder()
        return (self.folder / "lock").open("w")

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(self.folder)

    def _load_packages(self, request: CompileRequest, folder: Path) -> PaddedStage:
        with unpack_under(self.folder / _UNPACKED):
            packages = {size: _load_package(folder / f"{size}.pt2") for size in batch_sizes(request.max_batch_size)}
        page_out(self.folder / _UNPACKED)
        return PaddedStage(request.spec, packages)

    def _measure(self, stage: BundleStage, request: CompileRequest, folder: Path) -> None:
        """Replace the packages in `folder` by the measurement if they are not clearly faster than eager mode, or not accurate."""
        compiled = self._load_packages(request, folder)
        sizes = request.sample_shape, request.max_batch_size
        chosen = compare(stage, *sizes, request.precision, compiled, request.threads, _MEASURE_S)
        if chosen.module is not compiled:
            for package in folder.iterdir():
                package.unlink()
            (folder / _SLOWER).write_text(chosen.why)

    def _discard(self, made: Path) -> Path:
        """Rename a folder out of the cache atomically, so that a crash while its files are deleted leaves no partial folder."""
        away = self.folder / f"making-no-more-{uuid.uuid4().hex}"
        with suppress(OSError):  # another process has done it, or the folder is not writable
            made.rename(away)
        return away

    def _evict(self, newest: Path) -> None:
        """Remove the least recently used folders above the limit, and leftovers of killed processes."""
        kept = 0
        folders = [
            path for path in self.folder.iterdir() if path.is_dir() and path not in (newest, self.folder / _UNPACKED)
        ]
        for path in [newest, *sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)]:
            kept += sum(file.stat().st_size for file in path.iterdir())
            if path != newest and (kept > MAX_CACHE_BYTES or path.name.startswith("making-")):
                shutil.rmtree(path if path.name.startswith("making-") else self._discard(path), ignore_errors=True)


def compile_unavailable_reason() -> str:
    """Why this machine cannot compile; empty if it can."""
    # Importing takes a second, and most processes never compile.
    from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: PLC0415
    from torch._inductor.exc import InvalidCxxCompiler  # noqa: PLC0415

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler: install g++, or set CXX"
    return ""


def _aligning_compiler(folder: Path) -> Path:
    """Make a command in `folder` that runs the C++ compiler with `_ALIGNED_MALLOC`. It has the compiler's name, which inductor reads."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: PLC0415

    compiler, header = get_cpp_compiler(), folder / "aligned_malloc.h"
    header.write_text(_ALIGNED_MALLOC)
    command = folder / Path(compiler).name
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(compiler)} -include {shlex.quote(str(header))} "$@"\n')
    command.chmod(0o700)
    return command


def _make_package(stage: BundleStage, request: CompileRequest, batch_size: int, file: Path, compiler: Path) -> None:
    workload = Workload(request.sample_shape, request.max_batch_size, (1,))
    folded = FoldedStage(stage, workload, ExecutionMode("compiled", request.precision).dtype)
    example = stage.spec.example(batch_size, request.sample_shape)
    # Workers that share cores change the number of threads between batches.
    settings = {
        "freezing": True,
        "cpp.dynamic_threads": True,
        "cpp.cxx": (None, str(compiler)),
        "aot_inductor.precompile_headers": False,  # they would be compiled again for each compiler command
    }
    try:
        with torch.no_grad():
            program = torch.export.export(folded, (example,))
            torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs=settings)
    except Exception as error:  # no common base class, and includes errors of the C++ compiler
        raise CompileError(f"{type(error).__name__}: {_first_line(error)}") from error


def _check_owner(folder: Path) -> None:
    """The cache contains native code. Raises CompileError if another user may have written it, OSError if there is no such folder."""
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CompileError(f"{folder} is not used: other users can write to it; chmod 700 it, or set XDG_CACHE_HOME")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _load_package(file: Path) -> Callable[[Tensor], Tensor]:
    package: Callable[[Tensor], Tensor] = torch._inductor.aoti_load_package(str(file))
    return package


def main(packages: str, folder: str) -> int:
    """Compile the request in `folder` at the lowest priority. Returns the exit status; writes the error to standard error."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(19)
    with suppress(OSError):  # the kernel groups processes by session, and the nice value orders only those of a group
        Path("/proc/self/autogroup").write_text(str(_GROUP_NICE))
    with suppress(OSError):  # short of memory, the kernel ends this process and not a worker
        Path("/proc/self/oom_score_adj").write_text("1000")
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    try:
        if reason := compile_unavailable_reason():
            sys.stderr.write(reason)
            return UNAVAILABLE
        CompiledStageCache(Path(packages)).compile(CompileRequest.read(Path(folder)))
    except (ModelError, OSError) as error:
        sys.stderr.write(str(error))
        return 1
    return 0


def _end_with_parent() -> None:
    """Kill this process group at end of file on standard input: the parent holds the other end of the pipe until it dies."""
    os.read(0, 1)  # not sys.stdin, whose lock would block the interpreter's exit
    os.killpg(0, signal.SIGKILL)
