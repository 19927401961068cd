"""Chooses the fastest execution mode of a stage on this device among those whose output is accurate enough, by measuring."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import inf, isnan
from statistics import geometric_mean

import torch
from torch import Tensor, nn

from multiworld_serving.models.bundle.stage import BundleStage, BundleStageSpec
from multiworld_serving.models.optimize.cuda_graphs import record_cuda_graphs
from multiworld_serving.models.optimize.execution_modes import (
    UNOPTIMIZED,
    ExecutionMode,
    StagePrecision,
    Tuning,
    candidates,
    compiled_mode,
)
from multiworld_serving.models.optimize.folding import FoldedStage
from multiworld_serving.models.optimize.fusing import Workload, torch_threads
from multiworld_serving.models.optimize.padded_stage import PaddedStage
from multiworld_serving.models.optimize.tracing import place

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
"""Largest `deviation` that a worker accepts for an execution mode, by precision. Measured for ResNet-18 to -152: 1e-6 in float32, 6e-3 in
bfloat16 and 1e-3 in float16."""

_LEAST_PROBABILITY = 1e-30
_ROUNDS = 5
_ROUNDS_ON_BUSY_MACHINE = 30
"""The compile process has the lowest priority, so most of its rounds wait for cores that workers use."""
_MEASURED_ROWS = 4
"""Batch size for measuring. Larger batches take proportionally longer and rank the modes alike."""
_GAIN = 0.03
"""A mode must be faster than a simpler one by at least this share: smaller differences are noise."""


@dataclass(frozen=True)
class OptimizedStage:
    """A stage that is ready to run, and why its mode was chosen.

    Attributes:
        module: on the device; rows in, rows out, as the stage.
        why: reason for the log.
    """

    module: nn.Module
    mode: ExecutionMode
    why: str


@dataclass
class Trial:
    """A measured execution mode.

    Attributes:
        deviation: of its output from the reference (`deviation`); NaN if the output is invalid.
        times_s: shortest time of all rounds, by threads and batch size.
    """

    mode: ExecutionMode
    module: nn.Module
    deviation: float = 0.0
    times_s: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def is_accurate(self) -> bool:
        """Whether the mode may be chosen. The unoptimized stage is the reference."""
        return self.deviation <= TOLERANCE[self.mode.precision]

    @property
    def cost_s(self) -> float:
        """Geometric mean, which weighs single requests and batches, and all thread counts, equally. Infinite if not measured."""
        return geometric_mean(self.times_s.values()) if self.times_s else inf

    def __str__(self) -> str:
        times = " and ".join(f"{time_s * 1e3:.1f}" for time_s in self.times_s.values())
        off = (
            ""
            if self.is_accurate
            else f", {self.deviation:.2g} off where {TOLERANCE[self.mode.precision]:g} is allowed"
        )
        return f"{self.mode} {f'{times} ms' if times else 'not timed'}{off}"


def optimize(
    stage: BundleStage,
    sample_shape: tuple[int, ...],
    max_batch_size: int,
    tuning: Tuning,
    device: torch.device,
    compiled: PaddedStage | None = None,
    threads: tuple[int, ...] = (),
) -> OptimizedStage:
    """Optimize `stage` as `tuning` says and move it to `device`. Blocks; if it measures, for about `tuning.limit_s` at most.

    Args:
        stage: on the CPU, with weights. It may become part of the result.
        sample_shape: shape of one row of its input; with variable dimensions of the longest.
        compiled: the same stage compiled in the precision of `compiled_mode`. It is taken if it is accurate,
            after "measure" or among several precisions only if it is also the fastest.
        threads: numbers of threads that may compute a batch on a CPU; weight layouts depend on them. Empty: torch's current number.
    """
    modes = candidates(tuning, device)
    workload = Workload(sample_shape, max_batch_size, threads or (torch.get_num_threads(),))
    makers: list[tuple[ExecutionMode, Callable[[], nn.Module]]] = [
        (mode, partial(_make, mode, stage, workload, device)) for mode in modes
    ]
    example = example_rows(stage.spec, min(max_batch_size, _MEASURED_ROWS), sample_shape)
    if compiled is not None and (tuning.optimize == "compile" or (tuning.optimize == "auto" and len(modes) == 1)):
        trial = Trial(compiled_mode(tuning, device), compiled)
        with torch.inference_mode():
            trial.deviation = _deviation(trial, stage.spec, example, stage(example), device)
        if trial.is_accurate:
            return OptimizedStage(compiled, trial.mode, f"from the cache; {trial.deviation:.1g} off")
    elif compiled is not None:
        makers.append((compiled_mode(tuning, device), lambda: compiled))
    if len(makers) == 1:
        if modes[0] != UNOPTIMIZED:
            return _or_as_written(
                stage, *makers[0], example, device, partial(_make, UNOPTIMIZED, stage, workload, device)
            )
        return OptimizedStage(makers[0][1](), modes[0], "asked for")
    return choose(makers, stage, stage.spec, example, device, tuning.limit_s, threads=threads)


def compare(
    stage: BundleStage,
    sample_shape: tuple[int, ...],
    max_batch_size: int,
    precision: StagePrecision,
    compiled: PaddedStage,
    threads: tuple[int, ...],
    limit_s: float,
) -> OptimizedStage:
    """The faster of `compiled` and what a CPU computes with `--optimize eager`. For the arguments, see `optimize` and `choose`."""
    cpu, tuning = torch.device("cpu"), Tuning(precision, "eager")
    (eager,) = candidates(tuning, cpu)
    makers: list[tuple[ExecutionMode, Callable[[], nn.Module]]] = [
        (eager, partial(_make, eager, stage, Workload(sample_shape, max_batch_size, threads), cpu)),
        (compiled_mode(tuning, cpu), lambda: compiled),
    ]
    example = example_rows(stage.spec, min(max_batch_size, _MEASURED_ROWS), sample_shape)
    return choose(makers, stage, stage.spec, example, cpu, limit_s, threads=threads, rounds=_ROUNDS_ON_BUSY_MACHINE)


def _or_as_written(
    stage: BundleStage,
    mode: ExecutionMode,
    make: Callable[[], nn.Module],
    example: Tensor,
    device: torch.device,
    as_written: Callable[[], nn.Module],
) -> OptimizedStage:
    """The mode; or the stage as written, if its graph cannot be rewritten or is not accurate enough then. Graphs may be of any model."""
    try:
        with torch.inference_mode():
            expected = stage(example)
        trial = Trial(mode, make())
        with torch.inference_mode():
            trial.deviation = _deviation(trial, stage.spec, example, expected, device)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - rewrites and operators raise many types
        why = f"{mode} cannot be built ({str(error).strip().partition(chr(10))[0]})"
    else:
        if trial.is_accurate:
            return OptimizedStage(trial.module, mode, f"asked for; {trial.deviation:.1g} off")
        why = str(trial)
    return OptimizedStage(as_written(), UNOPTIMIZED, why)


def choose(
    makers: Sequence[tuple[ExecutionMode, Callable[[], nn.Module]]],
    reference: nn.Module,
    spec: BundleStageSpec,
    example: Tensor,
    device: torch.device,
    limit_s: float,
    clock_s: Callable[[], float] = time.perf_counter,
    threads: tuple[int, ...] = (),
    rounds: int = _ROUNDS,
) -> OptimizedStage:
    """The fastest mode whose output is accurate. Modes that cannot be built are skipped, except the first, which raises.

    Args:
        makers: modes with functions that build them. The first is the fallback if all others are inaccurate or time runs out.
        reference: the stage, on the CPU in float32.
        spec: of the stage.
        example: an input batch on the CPU.
        limit_s: no mode is built and no round is started after this time.
        threads: see `optimize`.
        rounds: how often each mode is timed, at most.
    """
    threads = threads or (torch.get_num_threads(),)
    deadline_s = clock_s() + limit_s
    trials: list[Trial] = []
    failed: list[str] = []
    untried: list[ExecutionMode] = []
    with torch.inference_mode():
        expected = reference(example)
        # The most promising mode is last. Try the fallback first, then from the most promising on.
        for mode, make in (makers[0], *reversed(makers[1:])):
            if trials and clock_s() >= deadline_s:
                untried.append(mode)
                continue
            try:
                with torch.inference_mode(mode=False):
                    trial = Trial(mode, make())
                if mode != UNOPTIMIZED:
                    trial.deviation = _deviation(trial, spec, example, expected, device)
            except RuntimeError as error:  # from torch: a graph cannot be recorded, out of memory, ...
                if not trials:
                    raise
                failed.append(f"{mode} cannot be built ({str(error).strip().partition(chr(10))[0]})")
                continue
            trials.append(trial)
        modes = [mode for mode, _ in makers]
        trials.sort(key=lambda trial: modes.index(trial.mode))
        close = [trial for trial in trials if trial.is_accurate] or trials[:1]
        _time(close, example, device, deadline_s, clock_s, threads, rounds)
    chosen = fastest(close)
    said = [*map(str, trials), *failed, *(f"{mode} no time to try" for mode in untried)]
    return OptimizedStage(
        chosen.module,
        chosen.mode,
        "measured for batches of 1 and {} with {} threads: {}".format(
            len(example), " and ".join(map(str, threads)), "; ".join(said)
        ),
    )


def fastest(trials: Sequence[Trial]) -> Trial:
    """The mode to use: a later one must be clearly faster. The first if nothing was measured."""
    best = trials[0]
    for trial in trials[1:]:
        if trial.cost_s < best.cost_s * (1 - _GAIN):
            best = trial
    return best


def _make(mode: ExecutionMode, stage: BundleStage, workload: Workload, device: torch.device) -> nn.Module:
    if mode == UNOPTIMIZED:
        place(stage.module, device)
        return stage.to(device)
    folded = FoldedStage(stage, workload, mode.dtype, fused=mode.method == "fused")
    place(folded.body, device)
    return (
        record_cuda_graphs(folded, workload.sample_shape, workload.max_batch_size, device)
        if mode.method == "graphed"
        else folded
    )


def example_rows(spec: BundleStageSpec, count: int, sample_shape: tuple[int, ...]) -> Tensor:
    """Deterministic rows: random pixels, random activations after a ReLU, and 1 for other integers: an index, or a mask."""
    generator = torch.Generator().manual_seed(1)

    def filled(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.normal_(generator=generator).relu_()
        if tensor.dtype == torch.uint8 and tensor.dim() == 4:
            return tensor.random_(0, 256, generator=generator)
        return torch.ones_like(tensor)

    return spec.pack_input([filled(tensor) for tensor in spec.unpack_input(spec.example(count, sample_shape))])


def deviation(output: Tensor, expected: Tensor, *, probabilities: bool = False) -> float:
    """Largest absolute difference of two tensors of the same shape, relative to the largest expected value.

    With `probabilities`, compares logarithms relative to their range, which is the relative difference of the logits. Softmax
    amplifies small differences of logits, so probabilities themselves would need a tolerance that accepts anything.

    Returns NaN if the output contains NaN: compare with `<=`, which is then false.
    """
    output, expected = output.to(torch.float32), expected.to(torch.float32)
    if not probabilities:
        return float((output - expected).abs().max()) / max(float(expected.abs().max()), _LEAST_PROBABILITY)
    if not bool(((output >= 0) & (output <= 1 + 1e-3)).all()):
        return float("nan")
    logits, expected_logits = (each.clamp_min(_LEAST_PROBABILITY).log() for each in (output, expected))
    spread = float(expected_logits.max() - expected_logits.min())
    return float((logits - expected_logits).abs().max()) / max(spread, 1.0)


def _deviation(trial: Trial, spec: BundleStageSpec, example: Tensor, expected: Tensor, device: torch.device) -> float:
    """The largest of all output tensors. NaN if one is invalid, or of another shape or dtype."""
    output: Tensor = trial.module(example.to(device)).cpu()
    if output.shape != expected.shape or output.dtype != expected.dtype:
        return float("nan")
    probabilities = spec.probabilities and trial.mode.precision != "float32"
    pairs = zip(spec.unpack_output(output), spec.unpack_output(expected), strict=True)
    found = [deviation(*pair, probabilities=probabilities) for pair in pairs]
    return next(filter(isnan, found), max(found))


def _time(
    trials: Sequence[Trial],
    example: Tensor,
    device: torch.device,
    deadline_s: float,
    clock_s: Callable[[], float],
    threads: tuple[int, ...],
    rounds: int,
) -> None:
    """Time all modes in interleaved rounds, so that other load on the machine affects all alike."""
    if len(trials) < 2:
        return
    for round_number in range(rounds + 1):
        if round_number > 1 and clock_s() >= deadline_s:
            return
        for count in threads:
            with torch_threads(count):
                for trial, batch_size in product(trials, (1, len(example))):
                    started_s = clock_s()
                    trial.module(example[:batch_size].to(device)).cpu()
                    if round_number:  # the first round warms up
                        point = (count, batch_size)
                        trial.times_s[point] = min(trial.times_s.get(point, inf), clock_s() - started_s)
