"""Stages of bundles compiled by the C++ compiler: equal to the reference, cached on disk, compiled in a separate process."""

import asyncio
import dataclasses
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
import torch

from multiworld_serving.models import (
    TOLERANCE,
    BundleStage,
    CompiledStageCache,
    CompileError,
    CompileRequest,
    PaddedStage,
    StageError,
    Tuning,
    deviation,
    load_bundle_stage,
    optimize,
)
from multiworld_serving.models.optimize import compiling
from multiworld_serving.models.optimize.padded_stage import batch_sizes
from multiworld_serving.models.optimize.selection import example_rows
from multiworld_serving.server.versions.stage_plan import StagePlan
from multiworld_serving.workers.compute import compiler
from multiworld_serving.workers.compute.compiler import Compiler
from multiworld_serving.workers.compute.engine import Engine
from multiworld_serving.workers.compute.stage_store import LoadedStage
from tests.bundles import classifier_bundle, text_bundle, two_outputs_bundle
from tests.cut_bundles import bundle_plan
from tests.resnets import sent_weights

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(compiling.compile_unavailable_reason()), reason="there is no C++ compiler here"),
]
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
STAGE = 1
"""Of two: takes what another stage has computed."""
LARGEST = 2
"""Batch size. There is compiled code for 1 and 2."""


@cache
def plans() -> tuple[StagePlan, ...]:
    with tempfile.TemporaryDirectory() as folder:
        return bundle_plan(classifier_bundle(Path(folder) / "bundle"), 2)


def request_for(plan: StagePlan) -> CompileRequest:
    return CompileRequest(plan.spec, plan.input_shape, LARGEST, "float32", (1,), bytearray(sent_weights(plan)))


def request_of() -> CompileRequest:
    return request_for(plans()[STAGE])


def stage_of(request: CompileRequest) -> BundleStage:
    return load_bundle_stage(request.spec, bytearray(request.weights))


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> CompiledStageCache:
    """A package folder with one stage, compiled by a separate process."""
    made = CompiledStageCache(tmp_path_factory.mktemp("compiled"))
    assert asyncio.run(Compiler(made).compile(request_of()))
    return made


@torch.inference_mode()
def test_compiled_stage_equals_the_reference_for_every_batch_size(packages: CompiledStageCache) -> None:
    request = request_of()
    compiled, stage = packages.load(request), stage_of(request)
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


@torch.inference_mode()
def test_stages_of_images_and_of_several_tensors_are_compiled(tmp_path: Path) -> None:
    """In bfloat16 where the stage takes images; packed rows where it returns two tensors."""
    packages = CompiledStageCache(tmp_path / "compiled")
    images = dataclasses.replace(request_for(plans()[0]), precision="bfloat16", max_batch_size=1)
    several = request_for(bundle_plan(two_outputs_bundle(tmp_path / "bundle"), 1)[0])
    for request in (images, dataclasses.replace(several, max_batch_size=1)):
        packages.compile(request)
        compiled, stage = packages.load(request), stage_of(request)
        assert compiled is not None
        rows = example_rows(request.spec, 1, request.sample_shape)
        outputs = (request.spec.unpack_output(each(rows)) for each in (compiled, stage))
        for output, expected in zip(*outputs, strict=True):
            assert output.dtype == expected.dtype
            assert deviation(output, expected) <= TOLERANCE[request.precision]


def test_compiled_stage_is_used_when_its_output_matches(packages: CompiledStageCache) -> None:
    request = request_of()
    stage = stage_of(request)
    compiled = packages.load(request)
    made = optimize(stage, request.sample_shape, LARGEST, Tuning(optimize="compile"), CPU, compiled)
    assert str(made.mode) == "compiled/float32"
    measured = optimize(stage, request.sample_shape, LARGEST, Tuning(optimize="measure", limit_s=60), CPU, compiled)
    assert "compiled/float32" in measured.why
    with torch.no_grad():
        for weight in stage.buffers():
            weight.mul_(2)  # now it differs
    other = optimize(stage, request.sample_shape, LARGEST, Tuning(optimize="compile"), CPU, compiled)
    assert str(other.mode) != "compiled/float32"
    packages_of_others = CompileRequest(
        request.spec, request.sample_shape, LARGEST, "float32", (1,), request.weights + b" "
    )
    assert packages.load(packages_of_others) is None


async def test_engine_serves_cached_compiled_code_immediately(
    packages: CompiledStageCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "threads", (1,))  # as in the request
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


def test_library_with_weights_is_not_kept_in_memory(packages: CompiledStageCache) -> None:
    compiled = packages.load(request_of())
    assert compiled is not None
    mapped, resident, ours = 0, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *fields = line.split()
        if not first.endswith(":"):
            ours = str(packages.folder / "unpacked") in line
        elif ours and first in ("Size:", "Rss:"):
            mapped, resident = (
                mapped + int(fields[0]) * (first == "Size:"),
                resident + int(fields[0]) * (first == "Rss:"),
            )
    assert mapped
    assert resident < mapped / 2, (resident, mapped)


def test_weights_of_compiled_code_are_aligned_to_cache_lines(packages: CompiledStageCache) -> None:
    """Otherwise convolutions in bfloat16 take 1.6 times as long with AMX."""
    with zipfile.ZipFile(packages.folder / request_of().key / f"{LARGEST}.pt2") as package:
        (library,) = (name for name in package.namelist() if name.endswith(".so"))
        assert b"aligned_alloc" in package.read(library)


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


async def test_one_process_of_the_machine_compiles_and_the_others_wait_for_its_result(
    packages: CompiledStageCache, tmp_path: Path
) -> None:
    cache, request = CompiledStageCache(tmp_path / "compiled"), request_of()
    with cache.open_lock() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = _children()
        waiting = asyncio.create_task(Compiler(cache).compile(request))
        assert not (await asyncio.wait([waiting], timeout=0.5))[0]
        assert _children() == others, "a waiting process would hold memory"
        shutil.copytree(packages.folder / request.key, cache.folder / request.key)
    assert await asyncio.wait_for(waiting, 60)


async def test_rows_of_different_lengths_are_not_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache, request = (
        CompiledStageCache(tmp_path / "compiled"),
        request_for(bundle_plan(text_bundle(tmp_path / "bundle"), 1)[0]),
    )
    assert not await Compiler(cache).compile(request)
    assert "its rows have different lengths" in caplog.text
    caplog.clear()
    assert not await Compiler(cache).compile(request, asked=False)
    assert not caplog.text, "nobody asked for compiled code"
    assert not cache.folder.exists()


def test_compiled_code_is_not_loaded_without_enough_memory(
    packages: CompiledStageCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    monkeypatch.setattr(compiler, "check_memory", limits.append)
    assert Compiler(packages).load(request_of()) is not None
    (needed_bytes,) = limits
    assert needed_bytes > 2 * len(request_of().weights), "one copy for each batch size"

    def refuse(_: int) -> None:
        raise MemoryError("too little")

    monkeypatch.setattr(compiler, "check_memory", refuse)
    assert Compiler(packages).load(request_of()) is None
    assert "without compiled code: too little" in caplog.text


def processes_of(session: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                yield int(entry.name)


def autogroup(pid: int) -> str:
    """By which the kernel orders sessions; empty if it does not group them."""
    try:
        return Path(f"/proc/{pid}/autogroup").read_text()
    except FileNotFoundError:
        return ""


async def test_compilation_is_stopped_and_cleaned_up_when_its_caller_ends(tmp_path: Path) -> None:
    packages = CompiledStageCache(tmp_path / "compiled")
    task = asyncio.create_task(Compiler(packages).compile(request_of()))
    await asyncio.to_thread(wait_until, lambda: bool(list(packages.folder.glob("making-*"))))
    ours = [pid for pid in _children() if list(processes_of(pid))]
    assert len(ours) == 1
    assert os.getpriority(os.PRIO_PROCESS, ours[0]) == 19
    assert autogroup(ours[0]).endswith("nice 10\n") or not autogroup(os.getpid())
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


async def test_compiled_code_that_is_not_faster_is_measured_once_and_not_used(
    packages: CompiledStageCache, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, cache, taken = request_of(), CompiledStageCache(tmp_path), tmp_path / "taken"
    compiled = packages.load(request)
    assert compiled is not None

    def late(batch: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        output: torch.Tensor = compiled(batch)
        return output

    slow = PaddedStage(request.spec, {LARGEST: late})
    monkeypatch.setattr(cache, "_load_packages", lambda *_: slow)
    taken.mkdir()
    (taken / "1.pt2").write_bytes(b"code")
    cache._measure(stage_of(request), request, taken)
    assert [path.name for path in taken.iterdir()] == ["slower.txt"]
    taken.rename(tmp_path / request.key)
    assert cache.load(request) is None
    with caplog.at_level(logging.INFO):
        assert not await Compiler(cache).compile(request)
    assert "which is not faster: measured for batches of 1 and 2 with 1 threads" in caplog.text
    assert "compiled/float32" in caplog.text


async def test_nothing_is_compiled_without_enough_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(needed_bytes: int) -> None:
        raise MemoryError(f"needs {needed_bytes // 10**6} MB")

    monkeypatch.setattr(compiler, "check_memory", refuse)
    cache = CompiledStageCache(tmp_path / "compiled")
    assert not await Compiler(cache).compile(request_of())
    assert "needs 1" in caplog.text
    assert not list(cache.folder.glob("*/"))


def test_code_that_other_users_can_write_is_not_loaded(packages: CompiledStageCache, tmp_path: Path) -> None:
    shared = CompiledStageCache(tmp_path)
    (tmp_path / request_of().key).mkdir()
    tmp_path.chmod(0o777)
    for use in (shared.load, shared.compile, lambda _: shared.open_lock()):
        with pytest.raises(CompileError, match="other users can write to it"):
            use(request_of())
    assert packages.folder.stat().st_mode & 0o022 == 0


def test_least_recently_used_packages_are_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = CompiledStageCache(tmp_path)
    for age, name in enumerate(["newest", "used", "forgotten", "making-left-behind"]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.pt2").write_bytes(bytes(100))
        os.utime(tmp_path / name, (time.time() - age, time.time() - age))
    monkeypatch.setattr(compiling, "MAX_CACHE_BYTES", 250)
    packages._evict(tmp_path / "newest")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest", "used"]
