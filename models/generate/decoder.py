"""A part of a decoder as a stage. Layers are transformers' own modules, behind its public `Cache` interface.

A row is one step of a sequence: the prompt, or the last token. It names the session, and how many tokens the session must have. If the
stage does not have exactly these, the row is lost, and the frontend begins a new session with all tokens so far. So a step that was
computed twice, or by a replica that missed one, never changes a text. Recovery by a replay of the tokens is the idea of Petals.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multiworld_serving.models.errors import StageSpecError
from multiworld_serving.models.generate.sessions import Sessions, batch_cache, mask_of
from multiworld_serving.models.stages.api import Stage

LOST, FULL = "lost", "full"
"""Results of a row without a token: the stage does not have the session, or no room for it."""
_TEST_TOKENS = 6
_TOLERANCE = 1e-3
"""Largest difference of a part from the same layers in the whole model, relative to the largest value."""


def decoder_part(folder: Path, index: int, parts: int, session_tokens: int) -> type[Stage]:
    """The class of one part of a decoder.

    Args:
        index: of the part among `parts`.
        session_tokens: see `Sessions`.
    """

    class Decoder(Stage):
        def setup(self, device: str) -> None:
            self.part = DecoderPart(folder, index, parts, torch.device(device), session_tokens)

        def __call__(self, rows: Sequence[Any]) -> list[Any]:
            return self.part.compute(rows)

    return Decoder


class DecoderPart:
    """Some layers of a decoder, with the sessions in them.

    Raises:
        StageSpecError: transformers is missing, or the model has another structure or too few layers.
    """

    def __init__(self, folder: Path, index: int, parts: int, device: torch.device, session_tokens: int) -> None:
        try:
            from transformers import AutoModelForCausalLM  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise StageSpecError("generation requires: pip install 'multiworld-serving[generate]'") from error
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
        body = getattr(model, model.base_model_prefix, None)
        layers = next((name for name in ("layers", "h") if hasattr(body, name)), None)
        if body is None or layers is None:
            raise StageSpecError(
                f"{type(model).__name__} has no list of layers; expected a decoder such as Llama, Qwen or GPT-2"
            )
        blocks: nn.ModuleList = getattr(body, layers)
        if parts > len(blocks):
            raise StageSpecError(
                f"the decoder has {len(blocks)} layers, and cannot have {parts} stages; choose fewer --stages"
            )
        first, end = (len(blocks) * each // parts for each in (index, index + 1))
        self._first, self._is_first, self._is_last = first, index == 0, index + 1 == parts
        tokens = list(range(1, 1 + _TEST_TOKENS))
        with torch.inference_mode():
            whole = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        given, expected = whole.hidden_states[first][0], whole.hidden_states[end][0]
        setattr(body, layers, blocks[first:end])
        if not self._is_last:
            setattr(body, "norm" if hasattr(body, "norm") else "ln_f", nn.Identity())
        if not self._is_first and hasattr(body, "wpe"):  # GPT-2 adds positions to hidden states, too
            body.wpe.weight.data = torch.zeros_like(body.wpe.weight)
        self._config, self._device = model.config.get_text_config(), device
        self._head: nn.Module = model.get_output_embeddings() if self._is_last else nn.Identity()
        self._head.to(device)
        self._body = body.to(device)
        self._dtype = next(self._body.parameters()).dtype
        parameters = inspect.signature(self._body.forward).parameters
        self._cache = "cache" if "cache" in parameters else "past_key_values"
        self.sessions = Sessions(_TEST_TOKENS)
        row = {"tokens": tokens} if self._is_first else {"hidden": given}
        with torch.inference_mode():
            (found,), _ = self._hidden([row], [self.sessions.open("", _TEST_TOKENS)])
        off = float((found.cpu() - expected).abs().max() / expected.abs().max())
        if not off <= _TOLERANCE:
            raise StageSpecError(
                f"{type(model).__name__} computes more than its layers: part {index} of {parts} is {off:.2g} off; serve it with "
                "--stages 1, or another model"
            )
        self.sessions = Sessions(session_tokens)

    def compute(self, rows: Sequence[Any]) -> list[Any]:
        """One step of each sequence: hidden states for the next part, or the next token."""
        found: list[Any] = [dict(each) if isinstance(each, dict) else each for each in rows]
        live = []
        for index, row in enumerate(found):
            if "end" in row:
                self.sessions.close(row["end"])
            elif "result" not in row:
                session = self._session(row)
                if session is None:
                    found[index] = {"result": LOST if row["position"] else FULL}
                else:
                    live.append((index, row, session))
        if live:
            hidden, counts = self._hidden([row for _, row, _ in live], [session for *_, session in live])
            for (index, row, session), states, count in zip(live, hidden, counts, strict=True):
                session.length += count
                if self._is_last:
                    found[index] = {"result": self._sampled(states[count - 1], row)}
                else:
                    found[index] = row | {"hidden": states[:count].cpu()}
                    found[index].pop("tokens", None)
        return found

    def _session(self, row: dict[str, Any]) -> Any:
        if row["position"]:
            return self.sessions.find(row["session"], row["position"])
        self.sessions.close(row["replaces"])
        return self.sessions.open(row["session"], row["capacity"])

    def _hidden(self, rows: list[dict[str, Any]], sessions: list[Any]) -> tuple[Tensor, list[int]]:
        """The hidden states [batch, new, width], after the last norm in the last part, and the number of new tokens of each row."""
        if self._is_first:
            given = [torch.tensor(row["tokens"], device=self._device) for row in rows]
        else:
            given = [row["hidden"].to(self._device) for row in rows]
        counts = [len(each) for each in given]
        padded = nn.utils.rnn.pad_sequence(given, batch_first=True)
        longest = max(session.length + count for session, count in zip(sessions, counts, strict=True))
        starts = torch.tensor([session.length for session in sessions], device=self._device)
        positions = starts[:, None] + torch.arange(padded.shape[1], device=self._device)
        limit = getattr(self._config, "max_position_embeddings", None) or longest
        output = self._body(
            **{"input_ids" if self._is_first else "inputs_embeds": padded, self._cache: batch_cache(sessions, counts)},
            attention_mask=self._masks(positions, longest),
            position_ids=positions.clamp(max=limit - 1),
            use_cache=True,
        )
        return output.last_hidden_state, counts

    def _masks(self, positions: Tensor, longest: int) -> Tensor | dict[str, Tensor]:
        """The mask; one for each kind of layer if some see a window only."""
        window = getattr(self._config, "sliding_window", None)
        full = mask_of(positions, longest, self._dtype)
        if window is None or getattr(self._config, "use_sliding_window", True) is False:
            return full
        sliding = mask_of(positions, longest, self._dtype, window)
        kinds = set(getattr(self._config, "layer_types", None) or ["sliding_attention"])
        if len(kinds) > 1:
            return {"full_attention": full, "sliding_attention": sliding}
        return sliding if "sliding_attention" in kinds else full

    def _sampled(self, state: Tensor, row: dict[str, Any]) -> int:
        """The next token. It depends on logits, seed and position only, so that a replay continues the same text.

        Each token has its own noise (Gumbel-max trick), so the result does not depend on the order of tokens with almost equal logits.
        """
        logits = self._head(state).float()
        if (softcap := getattr(self._config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / softcap) * softcap
        temperature, top_p, seed, place = row["sampling"]
        if not temperature:
            return int(logits.argmax())
        weights = ((logits - logits.max()) / temperature).softmax(-1).cpu()
        if top_p < 1:
            ordered, tokens = weights.sort(descending=True, stable=True)
            weights[tokens[ordered.cumsum(0) - ordered >= top_p]] = 0
        drawn = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + place) % (1 << 63))
        return int((weights / torch.empty_like(weights).exponential_(generator=drawn)).argmax())
