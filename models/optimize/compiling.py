"""Stages compiled ahead of time by inductor, kept on the disk, and loaded in a fraction of a second.

Compiling takes a compiler, and minutes in which nothing interrupts it, so a process of its own does it (`python -m models.optimize`),
beside a worker that serves already. What it makes is a folder with a package of AOTInductor for each batch size; between them a batch
is filled up with zeros. Weights are frozen into the code, so the folder's name says all that it depends on.
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
import torch._inductor
from torch import Tensor

from models.errors import ModelError
from models.optimize.folding import FoldedStage
from models.optimize.recipes import Recipe, StagePrecision, processor_says
from models.optimize.sizes import FixedSizes, batch_sizes
from models.optimize.unpacking import unpacking_in
from models.stage_spec import StageSpec
from models.stages import Stage, build_stage, stage_input_dtype

MOST_BYTES = 8 << 30
"""What all packages may take on the disk; the ones that were not used for longest go first."""
UNAVAILABLE = 3
"""Exit status of the program where nothing can be compiled, whatever the stage."""
_REQUEST, _WEIGHTS = "request.json", "weights.safetensors"
_UNPACKED = "unpacked"


class CompileError(ModelError):
    """A stage cannot be compiled here. The message says why in one line."""


@dataclass(frozen=True)
class CompileRequest:
    """What is to be compiled.

    Attributes:
        row_shape: of one row of the stage's input.
        max_batch_size: rows of the largest batch.
        precision: of the blocks, as in `Recipe`.
        weights: the stage's parameters and buffers as a safetensors file.
    """

    spec: StageSpec
    row_shape: tuple[int, ...]
    max_batch_size: int
    precision: StagePrecision
    weights: bytes

    @property
    def key(self) -> str:
        """Names what comes of it: other weights, another torch or another processor make other code."""
        processor = sorted(set(processor_says("model name", "flags", "features")))  # what code made here may use
        text = json.dumps(
            [self.spec.to_json(), self.row_shape, self.max_batch_size, self.precision, torch.__version__, processor]
        )
        return hashlib.sha256(text.encode() + hashlib.sha256(self.weights).digest()).hexdigest()[:32]

    def write(self, folder: Path) -> None:
        """Into a folder, for `read` of another process. Raises OSError."""
        fields = {"row_shape": self.row_shape, "max_batch_size": self.max_batch_size, "precision": self.precision}
        (folder / _REQUEST).write_text(json.dumps({"spec": self.spec.to_json(), **fields}))
        (folder / _WEIGHTS).write_bytes(self.weights)

    @classmethod
    def read(cls, folder: Path) -> "CompileRequest":
        """What `write` wrote. Raises OSError, StageError."""
        fields = json.loads((folder / _REQUEST).read_text())
        shape = tuple(fields["row_shape"])
        weights = (folder / _WEIGHTS).read_bytes()
        return cls(StageSpec.from_json(fields["spec"]), shape, fields["max_batch_size"], fields["precision"], weights)


class CompiledStages:
    """The packages on this machine's disk, for all its processes.

    Args:
        folder: `$XDG_CACHE_HOME/multiworld/compiled` by default, or that in `~/.cache`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        # Not Path.home(), which raises for a user who has none.
        cache = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or tempfile.gettempdir()) / ".cache"
        self.folder = folder or Path(cache) / "multiworld" / "compiled"

    def load(self, request: CompileRequest) -> FixedSizes | None:
        """What was compiled of this; None when nothing was. Raises CompileError when it cannot be loaded."""
        found = self.folder / request.key
        if not found.is_dir():
            return None
        try:
            os.utime(found)
            with unpacking_in(self.folder / _UNPACKED):
                packages = {rows: _load_package(found / f"{rows}.pt2") for rows in batch_sizes(request.max_batch_size)}
        except (OSError, RuntimeError) as error:
            self._put_away(found)  # or it would be found again each time, and never made anew
            raise CompileError(f"{found} cannot be loaded: {_first_line(error)}") from error
        return FixedSizes(request.spec, packages)

    def compile(self, request: CompileRequest) -> None:
        """Make the packages, unless they are there, or another process makes them now: then wait for it.

        Takes minutes, and cannot be interrupted but by the end of the process. Raises CompileError, OSError.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._one_at_a_time():
            made = self.folder / request.key
            if made.is_dir():
                return
            stage = build_stage(request.spec)
            stage.load_state_dict(safetensors.torch.load(request.weights), strict=True)
            with tempfile.TemporaryDirectory(prefix="making-", dir=self.folder) as making:
                for rows in batch_sizes(request.max_batch_size):
                    _make_package(stage, request, rows, Path(making) / f"{rows}.pt2")
                Path(making).rename(made)
                Path(making).mkdir()  # for the block to remove
            self._make_room(made)

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """The kernel ends it with whoever holds it."""
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _put_away(self, made: Path) -> Path:
        """Have it gone at once and whole, whatever becomes of us while its files are removed."""
        away = self.folder / f"making-no-more-{uuid.uuid4().hex}"
        with suppress(OSError):  # somebody else has done it, or the folder is not ours to write
            made.rename(away)
        return away

    def _make_room(self, newest: Path) -> None:
        """Remove what was not used for longest, and what processes that were killed left behind."""
        kept = 0
        folders = [
            path for path in self.folder.iterdir() if path.is_dir() and path not in (newest, self.folder / _UNPACKED)
        ]
        for path in [newest, *sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)]:
            kept += sum(file.stat().st_size for file in path.iterdir())
            if path != newest and (kept > MOST_BYTES or path.name.startswith("making-")):
                shutil.rmtree(path if path.name.startswith("making-") else self._put_away(path), ignore_errors=True)


def why_not_compiled() -> str:
    """Why nothing can be compiled on this machine; empty when it can."""
    # It takes a second to import, and most processes never compile.
    from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: PLC0415
    from torch._inductor.exc import InvalidCxxCompiler  # noqa: PLC0415

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler: install g++, or name one in CXX"
    return ""


def _make_package(stage: Stage, request: CompileRequest, rows: int, file: Path) -> None:
    folded = FoldedStage(stage, Recipe("compiled", request.precision).dtype)
    sample = torch.zeros((rows, *request.row_shape), dtype=stage_input_dtype(request.spec))
    # Workers that share their cores compute with other numbers of threads from batch to batch.
    settings = {"freezing": True, "cpp.dynamic_threads": True}
    try:
        with torch.no_grad():
            program = torch.export.export(folded, (sample,))
            torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs=settings)
    except Exception as error:  # of a dozen kinds, down to the C++ compiler's
        raise CompileError(f"{type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _load_package(file: Path) -> Callable[[Tensor], Tensor]:
    package: Callable[[Tensor], Tensor] = torch._inductor.aoti_load_package(str(file))
    return package


def main(packages: str, folder: str) -> int:
    """Compile the request in a folder, out of the way of who else computes. Gives the exit status; says why not on standard error."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(19)
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    try:
        if reason := why_not_compiled():
            sys.stderr.write(reason)
            return UNAVAILABLE
        CompiledStages(Path(packages)).compile(CompileRequest.read(Path(folder)))
    except (ModelError, OSError) as error:
        sys.stderr.write(str(error))
        return 1
    return 0


def _end_with_parent() -> None:
    """Our standard input is a pipe that whoever started us holds; it ends when they do, even by SIGKILL."""
    os.read(0, 1)  # not by sys.stdin, whose lock the end of the interpreter wants
    os.killpg(0, signal.SIGKILL)
