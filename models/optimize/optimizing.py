"""The fastest way to compute a stage on this device among those whose output is close enough: measured, not guessed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, sqrt

import torch
from torch import Tensor, nn

from models.optimize.closeness import TOLERANCE, deviation
from models.optimize.folding import FoldedStage
from models.optimize.fusing import Uses
from models.optimize.graphs import graphed
from models.optimize.recipes import PLAIN, Recipe, Tuning, candidates, compiled_recipe
from models.optimize.sizes import FixedSizes
from models.stages import Stage

_ROUNDS = 5
_MEASURED_ROWS = 4
"""A larger batch takes as many times longer, and says no more about which way is the fastest."""
_GAIN = 0.03
"""A way must be faster by this share than a simpler one that comes before it: less is noise."""


@dataclass(frozen=True)
class Optimized:
    """A stage that is ready to run, and how it came about.

    Attributes:
        module: on the device; takes and returns what the stage does.
        why: one sentence for the log.
    """

    module: nn.Module
    recipe: Recipe
    why: str


@dataclass
class Trial:
    """One way that is tried.

    Attributes:
        deviation: of its output from the reference, as `closeness.deviation` has it; not-a-number when it has none.
        times_s: of one row, and of a batch: the least of all rounds.
    """

    recipe: Recipe
    module: nn.Module
    deviation: float = 0.0
    times_s: list[float] = field(default_factory=lambda: [inf, inf])

    @property
    def is_close(self) -> bool:
        """Whether it may be chosen. The stage as it is is the reference."""
        return self.deviation <= TOLERANCE[self.recipe.precision]

    @property
    def cost_s(self) -> float:
        """Geometric mean: neither a lone request nor a full batch counts for more."""
        return sqrt(self.times_s[0] * self.times_s[1])

    def __str__(self) -> str:
        one_s, batch_s = self.times_s
        times = "not timed" if inf in self.times_s else f"{one_s * 1e3:.1f} and {batch_s * 1e3:.1f} ms"
        off = (
            "" if self.is_close else f", {self.deviation:.2g} off where {TOLERANCE[self.recipe.precision]:g} is allowed"
        )
        return f"{self.recipe} {times}{off}"


def optimize(
    stage: Stage,
    row_shape: tuple[int, ...],
    max_batch_size: int,
    tuning: Tuning,
    device: torch.device,
    compiled: FixedSizes | None = None,
    threads: tuple[int, ...] = (),
) -> Optimized:
    """Make `stage` fast as `tuning` says, and move it to `device`. Blocks; "auto" for up to about `tuning.limit_s`.

    Args:
        stage: on the CPU, with its weights. It may become part of the result.
        row_shape: of one row of its input.
        compiled: the same stage as it was compiled, in the precision of `compiled_recipe`. "compile" takes it when it is close, "auto"
            when it is the fastest too.
        threads: how many may compute a batch on a CPU, which layouts of weights depend on; as many as torch takes now if empty.
    """
    recipes = candidates(tuning, device)
    uses = Uses(row_shape, max_batch_size, threads or (torch.get_num_threads(),))
    makers: list[tuple[Recipe, Callable[[], nn.Module]]] = [
        (recipe, partial(_make, recipe, stage, uses, device)) for recipe in recipes
    ]
    sample = _sample(stage, min(max_batch_size, _MEASURED_ROWS), row_shape)
    if compiled is not None and tuning.optimize == "compile":
        trial = Trial(compiled_recipe(tuning, device), compiled)
        with torch.inference_mode():
            trial.deviation = _deviation(trial, sample, stage(sample), device)
        if trial.is_close:
            return Optimized(compiled, trial.recipe, f"asked for; {trial.deviation:.1g} off")
    elif compiled is not None:
        makers.append((compiled_recipe(tuning, device), lambda: compiled))
    if len(makers) == 1:
        return Optimized(makers[0][1](), recipes[0], "asked for")
    return choose(makers, stage, sample, device, tuning.limit_s)


def choose(
    makers: Sequence[tuple[Recipe, Callable[[], nn.Module]]],
    reference: nn.Module,
    sample: Tensor,
    device: torch.device,
    limit_s: float,
    clock_s: Callable[[], float] = time.perf_counter,
) -> Optimized:
    """The fastest of some ways whose output is close to the reference's. A way that cannot be made is left out, but for the first.

    Args:
        makers: how to make each, the one to fall back to first: it is taken when all others are off or time is up.
        reference: on the CPU, in float32.
        sample: a batch of input, on the CPU.
        limit_s: nothing new is begun after it.
    """
    deadline_s = clock_s() + limit_s
    trials: list[Trial] = []
    failed: list[str] = []
    untried: list[Recipe] = []
    with torch.inference_mode():
        expected = reference(sample)
        # What promises most comes last, and is tried before what lies between it and what there is to fall back to.
        for recipe, make in (makers[0], *reversed(makers[1:])):
            if trials and clock_s() >= deadline_s:
                untried.append(recipe)
                continue
            try:
                with torch.inference_mode(mode=False):
                    trial = Trial(recipe, make())
                if recipe != PLAIN:
                    trial.deviation = _deviation(trial, sample, expected, device)
            except RuntimeError as error:  # as torch's all are: no graph can be recorded, no memory is left, …
                if not trials:
                    raise
                failed.append(f"{recipe} cannot be had ({str(error).strip().partition(chr(10))[0]})")
                continue
            trials.append(trial)
        recipes = [recipe for recipe, _ in makers]
        trials.sort(key=lambda trial: recipes.index(trial.recipe))
        close = [trial for trial in trials if trial.is_close] or trials[:1]
        _time(close, sample, device, deadline_s, clock_s)
    chosen = fastest(close)
    said = [*map(str, trials), *failed, *(f"{recipe} no time to try" for recipe in untried)]
    return Optimized(
        chosen.module, chosen.recipe, "measured for batches of 1 and {}: {}".format(len(sample), "; ".join(said))
    )


def fastest(trials: Sequence[Trial]) -> Trial:
    """Which one to take: one that comes later must be clearly faster. The first when nothing could be measured."""
    best = trials[0]
    for trial in trials[1:]:
        if trial.cost_s < best.cost_s * (1 - _GAIN):
            best = trial
    return best


def _make(recipe: Recipe, stage: Stage, uses: Uses, device: torch.device) -> nn.Module:
    if recipe == PLAIN:
        return stage.to(device)
    folded = FoldedStage(stage, recipe.dtype, fuse_for=uses if recipe.form == "fused" else None).to(device)
    return graphed(folded, uses.row_shape, uses.max_batch_size, device) if recipe.form == "graphed" else folded


def _sample(stage: Stage, rows: int, row_shape: tuple[int, ...]) -> Tensor:
    """Input like the canary's: noise, or activations as they come out of a ReLU. The same every time."""
    generator = torch.Generator().manual_seed(1)
    if stage.spec.is_first:
        return torch.randint(0, 256, (rows, *row_shape), dtype=torch.uint8, generator=generator)
    return torch.randn((rows, *row_shape), generator=generator).relu_()


def _deviation(trial: Trial, sample: Tensor, expected: Tensor, device: torch.device) -> float:
    output: Tensor = trial.module(sample.to(device)).cpu()
    if output.shape != expected.shape or output.dtype != expected.dtype:
        return float("nan")
    is_last = expected.ndim == 2
    return deviation(output, expected, probabilities=is_last and trial.recipe.precision != "float32")


def _time(
    trials: Sequence[Trial], sample: Tensor, device: torch.device, deadline_s: float, clock_s: Callable[[], float]
) -> None:
    """Round after round, all ways in turn, so that what else the machine does hits all alike."""
    if len(trials) < 2:
        return
    for round_number in range(_ROUNDS + 1):
        if round_number > 1 and clock_s() >= deadline_s:
            return
        for trial in trials:
            for place, rows in enumerate((1, len(sample))):
                started_s = clock_s()
                trial.module(sample[:rows].to(device)).cpu()
                if round_number:  # the first round warms up
                    trial.times_s[place] = min(trial.times_s[place], clock_s() - started_s)
