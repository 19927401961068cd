"""Parts of decoders compute the tokens of `generate`, whatever shares their batches, and after a loss of sessions."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from multiworld_serving.models.errors import StageSpecError
from multiworld_serving.models.generate.decoder import FULL, LOST, DecoderPart
from multiworld_serving.models.generate.folder import digest_of
from multiworld_serving.models.generate.sessions import IDLE_S, Sessions
from tests.decoders import END, KINDS, expected_tokens, write_decoder

TIE = 1e-5
"""Logits that differ by less are equal, because sums of float32 depend on their order."""


class Text(NamedTuple):
    prompt: list[int]
    most: int
    sampling: tuple[float, float, int]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads of a small matrix wait for each other when other processes have the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parts_of(folder: Path, count: int = 2, tokens: int = 10_000) -> list[DecoderPart]:
    return [DecoderPart(folder, index, count, torch.device("cpu"), tokens) for index in range(count)]


def step(parts: list[DecoderPart], rows: list[dict[str, Any]]) -> list[Any]:
    found: list[Any] = rows
    with torch.inference_mode():
        for part in parts:
            found = part.compute(found)
    return [each.get("result") for each in found]


def row(session: str, tokens: list[int], position: int, sampling: tuple[float, float, int] = (0, 1, 0)) -> Any:
    return {
        "session": session,
        "replaces": session.replace("e", "c"),
        "tokens": tokens[position:],
        "position": position,
        "capacity": 100,
        "sampling": [*sampling, len(tokens)],
    }


def served(
    parts: list[DecoderPart], sequences: Sequence[Text], batch: int, loss_at: int | None = None
) -> list[list[int]]:
    """The generated tokens of each sequence. Up to `batch` share a step, and the next one joins when one has ended.

    Args:
        loss_at: the last stage loses all sessions before this step.
    """
    tokens = [list(each.prompt) for each in sequences]
    active, waiting, sessions, turn = list[int](), list(range(len(sequences)))[::-1], dict[int, str](), 0
    while active or waiting:
        if turn == loss_at:
            parts[-1].sessions = Sessions(10_000)
        while waiting and len(active) < batch:
            active.append(waiting.pop())
        rows = []
        for number in active:
            position = len(tokens[number]) - 1 if number in sessions else 0
            name = sessions.setdefault(number, f"{number}-{turn}")
            rows.append(row(name, tokens[number], position, sequences[number].sampling))
        for number, result in zip(tuple(active), step(parts, rows), strict=True):
            if result == LOST:
                del sessions[number]
                continue
            tokens[number].append(result)
            if result == END or len(tokens[number]) == len(sequences[number].prompt) + sequences[number].most:
                active.remove(number)
                step(parts, [{"end": sessions[number]}])
        turn += 1
    return [found[len(each.prompt) :] for found, each in zip(tokens, sequences, strict=True)]


def scores(logits: torch.Tensor, sampling: tuple[float, float, int], place: int) -> torch.Tensor:
    """The largest score is that of the next token, by the logits of the model of transformers and the documented rule."""
    temperature, top_p, seed = sampling
    if not temperature:
        return logits
    scaled = (logits / temperature).log_softmax(-1)
    order = scaled.argsort(descending=True)
    more_probable = scaled.exp()[order].cumsum(0) - scaled.exp()[order]
    scaled[order[more_probable >= top_p]] = -torch.inf
    drawn = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + place) % 2**63)
    return scaled - torch.empty(len(scaled)).exponential_(generator=drawn).log()


@torch.inference_mode()
def ties(model: Any, sequence: Text, found: list[int]) -> int:
    """How many tokens are not the best ones by the model of transformers. Fails if one of them is more than `TIE` below the best one."""
    logits = model(torch.tensor([[*sequence.prompt, *found]]), use_cache=False).logits[0]
    count = 0
    for place, token in enumerate(found, len(sequence.prompt)):
        temperature, top_p, seed = sequence.sampling
        if token == scores(logits[place - 1], sequence.sampling, place).argmax():
            continue
        count += 1
        almost = (scores(logits[place - 1], (temperature, top_p + off, seed), place) for off in (-TIE, 0, TIE))
        assert any(each.max() - each[token] <= TIE for each in almost), (sequence, found, place)
    return count


@pytest.mark.parametrize("kind", KINDS)
def test_64_greedy_and_64_seeded_sequences_have_the_tokens_of_transformers(
    kind: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    model, choice = write_decoder(tmp_path, kind), random.Random(53)
    sequences = [
        Text(
            [choice.randrange(1, END) for _ in range(choice.randint(1, 40))],
            choice.randint(3, 9),
            (choice.choice((0.5, 1.0, 1.5)), choice.choice((0.5, 0.9, 1.0)), choice.randrange(2**62))
            if number % 2
            else (0, 1, 0),
        )
        for number in range(128)
    ]
    mixed = served(parts_of(tmp_path), sequences, batch=12, loss_at=20)
    alone = served(parts_of(tmp_path, 1), sequences, batch=1)
    found_ties = 0
    for sequence, *both in zip(sequences, mixed, alone, strict=True):
        for found in both:
            found_ties += (here := ties(model, sequence, found))
            if not sequence.sampling[0] and not here:
                expected = expected_tokens(model, sequence.prompt, sequence.most)
                assert found[: len(expected)] == expected
                assert len(found) == sequence.most or found[-1] == END
    record_property("ties", found_ties)
    assert found_ties <= 1  # of 1,500 tokens


def test_sampled_tokens_depend_on_seed_and_position_only(tmp_path: Path) -> None:
    write_decoder(tmp_path)
    parts = parts_of(tmp_path, 1)
    tokens = [5, 6, 7]
    for _ in range(10):  # as one session
        tokens.append(step(parts, [row("a", tokens, 0 if len(tokens) == 3 else len(tokens) - 1, (1.0, 0.9, 7))])[0])
    replayed = [
        step(parts, [row(f"b{at}", tokens[:at], 0, (1.0, 0.9, 7)), row(f"c{at}", [9], 0)])[0] for at in range(3, 13)
    ]
    assert replayed == tokens[3:]
    other = [step(parts, [row(f"d{at}", tokens[:at], 0, (1.0, 0.9, 8))])[0] for at in range(3, 13)]
    assert other != tokens[3:]


def test_a_step_is_lost_unless_the_session_has_exactly_the_tokens_before_it(tmp_path: Path) -> None:
    write_decoder(tmp_path)
    parts = parts_of(tmp_path)
    first = step(parts, [row("a", [1, 2, 3], 0)])[0]
    assert step(parts, [row("a", [1, 2, 3, first, 9], 4)]) == [LOST]  # it skips one
    assert step(parts, [row("a", [1, 2, 3, first], 3)]) != [LOST]
    assert step(parts, [row("a", [1, 2, 3, first], 3)]) == [LOST]  # the second time
    assert step(parts, [row("unknown", [1, 2], 1)]) == [LOST]


def test_sessions_are_bounded_and_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_decoder(tmp_path)
    parts = parts_of(tmp_path, tokens=250)
    results = step(parts, [row(name, [1, 2], 0) for name in "abc"])
    assert results[2] == FULL
    assert FULL not in results[:2]
    end = {"end": "a"}
    with torch.inference_mode():
        assert parts[1].compute(parts[0].compute([end])) == [end]
    assert step(parts, [row("c", [1, 2], 0)]) != [FULL]
    assert [len(part.sessions) for part in parts] == [2, 2]
    assert step(parts, [row("e", [1, 2], 0)]) != [FULL]  # it replaces "c"
    monkeypatch.setattr("time.monotonic", lambda: 1e9 + IDLE_S)
    assert step(parts, [row("d", [1, 2], 0)]) != [FULL]


def test_a_model_that_computes_more_than_its_layers_is_refused(tmp_path: Path) -> None:
    KINDS["gpt_neox"] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    try:
        write_decoder(tmp_path, "gpt_neox")
    finally:
        del KINDS["gpt_neox"]
    with pytest.raises(StageSpecError, match="GPTNeoXForCausalLM computes more than its layers"):
        parts_of(tmp_path)


def test_too_many_stages_and_a_folder_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StageSpecError, match=r"expected config.json"):
        digest_of(tmp_path)
    write_decoder(tmp_path)
    with pytest.raises(StageSpecError, match="has 4 layers, and cannot have 5 stages"):
        DecoderPart(tmp_path, 0, 5, torch.device("cpu"), 100)
    assert digest_of(tmp_path) == digest_of(tmp_path)
