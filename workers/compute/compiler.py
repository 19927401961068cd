"""Compiles stages in a child process while this worker serves. The compiled code is cached for later loads and other workers."""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from multiworld_serving.common.config import check_memory
from multiworld_serving.models import CompiledStageCache, CompileError, CompileRequest, PaddedStage
from multiworld_serving.models.optimize import UNAVAILABLE

logger = logging.getLogger(__name__)

_TIMEOUT_S = 1800.0
_POLL_S = 1.0
"""Between two attempts to take the lock of the cache."""
_PROCESS_BYTES = 1 << 30
"""Memory of the compile process besides weights: torch with its compiler, and g++."""
_COPIES_OF_WEIGHTS = 6
"""Held by the compile process at once: received, as parameters, folded, frozen, and in two packages."""


class Compiler:
    """Shared by all sessions of a worker that computes on a CPU. The cache is shared by all workers of the machine.

    Args:
        stages: the cache; in the user's cache folder by default.
    """

    def __init__(self, stages: CompiledStageCache | None = None) -> None:
        self._stages = stages or CompiledStageCache()
        self._unavailable = ""
        self._warned = False

    def load(self, request: CompileRequest) -> PaddedStage | None:
        """The compiled stage from the cache; None if it is missing, cannot be loaded, or there is not enough memory.

        Blocks for up to a second.
        """
        try:
            check_memory(self._stages.package_bytes(request))
            return self._stages.load(request)
        except (CompileError, MemoryError) as error:
            logger.warning("stage=%d runs without compiled code: %s", request.spec.index, error)
            return None

    async def compile(self, request: CompileRequest, *, asked: bool = True) -> bool:
        """Compile into the cache, which takes minutes. Returns whether there is code to use; the log says why not.

        Waits while another process of the machine compiles. That nothing can be compiled on this machine is logged once.

        Args:
            asked: whether the user asked for compiled code, and is warned if there is none.
        """
        level = logging.WARNING if asked else logging.INFO
        if not self._unavailable:
            try:
                if request.spec.input_varies:
                    raise CompileError("its rows have different lengths")
                async with self._lock() as lock:
                    if not self._stages.is_done(request):
                        check_memory(_PROCESS_BYTES + _COPIES_OF_WEIGHTS * len(request.weights))
                        async with asyncio.timeout(_TIMEOUT_S):
                            await self._run(request, lock)
                if why := self._stages.slower(request):
                    logger.info(
                        "stage=%d stays without compiled code, which is not faster: %s", request.spec.index, why
                    )
                return not why
            except (CompileError, MemoryError, OSError, TimeoutError) as error:
                if not self._unavailable:
                    logger.log(level, "stage=%d cannot be compiled: %s", request.spec.index, str(error) or "timed out")
                    return False
        if not self._warned:
            self._warned = True
            logger.log(level, "stages cannot be compiled here and run as with --optimize eager: %s", self._unavailable)
        return False

    @contextlib.asynccontextmanager
    async def _lock(self) -> AsyncIterator[int]:
        """Hold the lock of the cache. Yields its file descriptor."""
        with await asyncio.to_thread(self._stages.open_lock) as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(_POLL_S)
            yield lock.fileno()

    async def _run(self, request: CompileRequest, lock: int) -> None:
        """Compile in a process, which inherits the lock, so that it stays locked until both processes have ended."""
        with tempfile.TemporaryDirectory(prefix="multiworld-compile-") as folder:
            await asyncio.to_thread(request.write, Path(folder))  # may be gigabytes
            # -P: as for local workers. A session of its own, so that its children can be killed with it. It exits at end of file on stdin.
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "multiworld_serving.models.optimize", str(self._stages.folder), folder),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                pass_fds=(lock,),
            )
            try:
                assert process.stderr is not None
                stderr = await process.stderr.read()
                status = await process.wait()
            finally:
                if process.returncode != 0:  # its children may still run
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if status == 0:
            return
        reason = (stderr.decode(errors="replace").strip().splitlines() or [f"exit status {status}"])[-1]
        if status == UNAVAILABLE:
            self._unavailable = reason
        raise CompileError(reason)
