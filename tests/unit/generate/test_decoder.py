"""Parts of decoders compute the tokens of `generate`, whatever shares their batches, and after a loss of sessions."""

from pathlib import Path
from typing import Any

import pytest
import torch

from multiworld_serving.models.errors import StageSpecError
from multiworld_serving.models.generate.decoder import FULL, LOST, DecoderPart
from multiworld_serving.models.generate.folder import digest_of
from multiworld_serving.models.generate.sessions import IDLE_S, Sessions
from tests.decoders import KINDS, expected_tokens, write_decoder

PROMPTS = [[3 + number * 7 + step for step in range(3 + 8 * number)] for number in range(4)]
COUNT = 24


def parts_of(folder: Path, count: int = 2, tokens: int = 10_000) -> list[DecoderPart]:
    return [DecoderPart(folder, index, count, torch.device("cpu"), tokens) for index in range(count)]


def step(parts: list[DecoderPart], rows: list[dict[str, Any]]) -> list[Any]:
    found: list[Any] = rows
    with torch.inference_mode():
        for part in parts:
            found = part.compute(found)
    return [each["result"] for each in found]


def row(session: str, tokens: list[int], position: int, sampling: tuple[float, float, int] = (0, 1, 0)) -> Any:
    return {
        "session": session,
        "tokens": tokens[position:],
        "position": position,
        "capacity": 100,
        "sampling": [*sampling, len(tokens)],
    }


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_different_ages_and_a_replay_have_the_tokens_of_generate(kind: str, tmp_path: Path) -> None:
    model = write_decoder(tmp_path, kind)
    parts, tokens = parts_of(tmp_path), [list(prompt) for prompt in PROMPTS]
    sessions, turn = dict[int, str](), 0
    while any(len(all_) < len(prompt) + COUNT for all_, prompt in zip(tokens, PROMPTS, strict=True)):
        if turn == 12:
            parts[1].sessions = Sessions(10_000)  # as after a restart
        active = [n for n in range(4) if n <= turn // 4 and len(tokens[n]) < len(PROMPTS[n]) + COUNT]
        rows = []
        for number in active:
            is_new = number not in sessions
            name = sessions.setdefault(number, f"{number}-{turn}")
            rows.append(row(name, tokens[number], 0 if is_new else len(tokens[number]) - 1))
        for number, result in zip(active, step(parts, rows), strict=True):
            if result == LOST:
                del sessions[number]
            else:
                tokens[number].append(result)
        turn += 1
    for prompt, found in zip(PROMPTS, tokens, strict=True):
        expected = expected_tokens(model, prompt, COUNT)
        assert found[len(prompt) :][: len(expected)] == expected


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
