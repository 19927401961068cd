"""Compiling beside serving: a process of its own makes the code, for this worker's next load and for whoever joins later."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

from models import CompiledStages, CompileError, CompileRequest, FixedSizes
from models.optimize import UNAVAILABLE

logger = logging.getLogger(__name__)

_LONGEST_S = 1800.0


class Compiler:
    """One for all sessions of a worker that computes on a CPU. Packages are shared with the other workers of the machine.

    Args:
        stages: where they are kept; the user's cache folder by default.
    """

    def __init__(self, stages: CompiledStages | None = None) -> None:
        self._stages = stages or CompiledStages()
        self._unavailable = ""
        self._warned = False

    def found(self, request: CompileRequest) -> FixedSizes | None:
        """The stage, where it was compiled before and can be loaded. Blocks, for up to a second."""
        try:
            return self._stages.load(request)
        except CompileError as error:
            logger.warning("stage=%d is computed without its compiled code: %s", request.spec.index, error)
            return None

    async def compile(self, request: CompileRequest) -> bool:
        """Make the code, which takes minutes. Gives whether it is there; where not, the log says why, but once that nothing can be."""
        if not self._unavailable:
            try:
                async with asyncio.timeout(_LONGEST_S):
                    await self._run(request)
                return True
            except (CompileError, OSError, TimeoutError) as error:
                if not self._unavailable:
                    logger.warning(
                        "stage=%d cannot be compiled: %s", request.spec.index, str(error) or "it took too long"
                    )
                    return False
        if not self._warned:
            self._warned = True
            logger.warning("stages are not compiled here, and go on as --optimize eager: %s", self._unavailable)
        return False

    async def _run(self, request: CompileRequest) -> None:
        with tempfile.TemporaryDirectory(prefix="multiworld-compile-") as folder:
            request.write(Path(folder))
            # -P: as for local workers. In a session of its own, so that what it started ends with it. Its input ends with us.
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "models.optimize", str(self._stages.folder), folder),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            try:
                assert process.stderr is not None
                complaints = await process.stderr.read()
                status = await process.wait()
            finally:
                if process.returncode != 0:  # what it started may live on
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if status == 0:
            return
        reason = (complaints.decode(errors="replace").strip().splitlines() or [f"it ended with status {status}"])[-1]
        if status == UNAVAILABLE:
            self._unavailable = reason
        raise CompileError(reason)
