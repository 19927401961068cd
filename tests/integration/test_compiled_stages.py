"""Stages compiled by the C++ compiler: equal to the reference, cached on disk, compiled in a separate process."""

import asyncio
import copy
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import safetensors.torch
import torch

from multiworld_serving.models import (
    TOLERANCE,
    CompiledStageCache,
    CompileError,
    CompileRequest,
    StageError,
    StageSpec,
    Tuning,
    deviation,
    optimize,
    reference_stage,
    split_model,
    stage_input_shape,
    stage_weights,
)
from multiworld_serving.models.optimize import compiling
from multiworld_serving.models.optimize.padded_stage import batch_sizes
from multiworld_serving.workers.compute.compiler import Compiler
from multiworld_serving.workers.compute.engine import Engine
from multiworld_serving.workers.compute.stage_store import LoadedStage
from tests.unit.models.models_loaded import IMAGE_SIZE, loaded

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(compiling.compile_unavailable_reason()), reason="there is no C++ compiler here"),
]
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
STAGE = 3
"""Of ten blocks: one residual block."""
LARGEST = 2
"""Batch size. There is compiled code for 1 and 2."""


def spec_of() -> StageSpec:
    return split_model(loaded("resnet18"), 10)[STAGE]


def request_of() -> CompileRequest:
    model, spec = loaded("resnet18"), spec_of()
    shape = stage_input_shape(spec, IMAGE_SIZE)
    return CompileRequest(
        spec, shape, LARGEST, "float32", bytearray(safetensors.torch.save(stage_weights(model, spec)))
    )


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> CompiledStageCache:
    """A package folder with one stage, compiled by a separate process."""
    made = CompiledStageCache(tmp_path_factory.mktemp("compiled"))
    assert asyncio.run(Compiler(made).compile(request_of()))
    return made


@torch.inference_mode()
def test_compiled_stage_equals_the_reference_for_every_batch_size(packages: CompiledStageCache) -> None:
    request, model = request_of(), loaded("resnet18")
    compiled, stage = packages.load(request), reference_stage(model, spec_of())
    assert compiled is not None
    for rows in (1, 2):
        batch = torch.rand(rows, *request.sample_shape)
        before = batch.clone()
        output, expected = compiled(batch), stage(batch)
        assert output.shape == expected.shape
        assert deviation(output, expected) <= TOLERANCE["float32"] / 10
        assert torch.equal(batch, before)
    with pytest.raises(StageError, match="at most 2"):
        compiled(torch.rand(3, *request.sample_shape))
    with pytest.raises(StageError, match=r"expected torch\.float32"):
        compiled(torch.zeros(1, *request.sample_shape, dtype=torch.uint8))


def test_compiled_stage_is_used_when_its_output_matches(packages: CompiledStageCache) -> None:
    request, stage = request_of(), copy.deepcopy(reference_stage(loaded("resnet18"), spec_of()))
    compiled = packages.load(request)
    made = optimize(stage, request.sample_shape, LARGEST, Tuning(optimize="compile"), CPU, compiled)
    assert str(made.mode) == "compiled/float32"
    auto = optimize(stage, request.sample_shape, LARGEST, Tuning(optimize="auto", limit_s=60), CPU, compiled)
    assert "compiled/float32" in auto.why
    with torch.no_grad():
        next(stage.parameters()).mul_(2)  # now it differs
    other = optimize(stage, request.sample_shape, LARGEST, Tuning(optimize="compile"), CPU, compiled)
    assert str(other.mode) != "compiled/float32"
    packages_of_others = CompileRequest(request.spec, request.sample_shape, LARGEST, "float32", request.weights + b" ")
    assert packages.load(packages_of_others) is None


async def test_engine_serves_cached_compiled_code_immediately(packages: CompiledStageCache) -> None:
    request, engine = request_of(), Engine(CPU, compiler=Compiler(packages))
    queue = engine.new_queue()
    try:
        tuning = Tuning(optimize="compile")
        made = await queue.load(request.spec, request.weights, request.sample_shape, LARGEST, tuning)
        queue.serve(1, LoadedStage(request.spec, made))
        assert str(made.mode) == "compiled/float32"
        computed = await queue.compute(1, STAGE, torch.zeros(2, *request.sample_shape))
        assert len(computed.output) == 2
    finally:
        engine.close()


def test_unpacked_files_of_a_killed_process_are_removed_by_the_next(packages: CompiledStageCache) -> None:
    unpacked = packages.folder / "unpacked"
    load = (
        "import sys, time; from pathlib import Path; from multiworld_serving.models.optimize import compiling\n"
        "folder, request = map(Path, sys.argv[1:])\n"
        "kept = compiling.CompiledStageCache(folder).load(compiling.CompileRequest.read(request))\n"
        "print('loaded', flush=True); time.sleep(600)"
    )
    with tempfile.TemporaryDirectory() as request, ExitStack() as running:
        request_of().write(Path(request))

        def start() -> subprocess.Popen[str]:
            command = [sys.executable, "-c", load, str(packages.folder), request]
            process = running.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
            running.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "loaded\n"
            return process

        def held() -> set[Path]:
            return {folder for folder in unpacked.glob("of-*") if list(folder.glob("aotinductor_*"))}

        before = held()
        one, other = start(), start()
        assert len(held() - before) == 2
        one.kill()
        one.wait()
        assert len(held() - before) == 2, "it could not remove its own files"
        start()
        assert len(held() - before) == 2, "those of the living process and of the new one"
        assert other.poll() is None


def test_nothing_is_compiled_twice(packages: CompiledStageCache) -> None:
    folder = packages.folder / request_of().key
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert sorted(before) == [f"{rows}.pt2" for rows in batch_sizes(LARGEST)]
    assert asyncio.run(Compiler(packages).compile(request_of()))
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_worker_continues_without_a_damaged_package(
    packages: CompiledStageCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    request, damaged = request_of(), CompiledStageCache(tmp_path)
    folder = tmp_path / request.key
    folder.mkdir()
    for rows in batch_sizes(LARGEST):
        (folder / f"{rows}.pt2").write_bytes(b"nothing of the kind")
    with pytest.raises(CompileError, match="cannot be loaded"):
        damaged.load(request)
    with caplog.at_level(logging.WARNING):
        folder.mkdir()
        assert Compiler(damaged).load(request) is None
    assert "without compiled code" in caplog.text
    assert not folder.exists(), "otherwise it would count as compiled and never be compiled again"
    assert damaged.load(request) is None


def test_missing_compiler_logs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("PATH", str(tmp_path))
    compiler = Compiler(CompiledStageCache(tmp_path / "compiled"))
    with caplog.at_level(logging.WARNING):
        assert not asyncio.run(compiler.compile(request_of()))
        assert not asyncio.run(compiler.compile(request_of()))
    assert [record.message for record in caplog.records] == [
        "stages cannot be compiled here and run as with --optimize eager: there is no C++ compiler: install g++, or set CXX"
    ]


def processes_of(session: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                yield int(entry.name)


async def test_compilation_is_stopped_and_cleaned_up_when_its_caller_ends(tmp_path: Path) -> None:
    packages = CompiledStageCache(tmp_path / "compiled")
    task = asyncio.create_task(Compiler(packages).compile(request_of()))
    await asyncio.to_thread(wait_until, lambda: bool(list(packages.folder.glob("making-*"))))
    ours = [pid for pid in _children() if list(processes_of(pid))]
    assert len(ours) == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.to_thread(wait_until, lambda: not list(processes_of(ours[0])))
    assert packages.load(request_of()) is None


def wait_until(done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _children() -> list[int]:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(pid) for pid in text.split()]


def test_least_recently_used_packages_are_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = CompiledStageCache(tmp_path)
    for age, name in enumerate(["newest", "used", "forgotten", "making-left-behind"]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.pt2").write_bytes(bytes(100))
        os.utime(tmp_path / name, (time.time() - age, time.time() - age))
    monkeypatch.setattr(compiling, "MAX_CACHE_BYTES", 250)
    packages._evict(tmp_path / "newest")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest", "used"]
