"""Texts and tokens of a decoder: the tokenizer, the chat template, and the tokens that end a text, from the folder of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.service.errors import InvalidInputError

_UNKNOWN_CONTEXT = 1 << 20


class TextCodec:
    """
    Args:
        folder: of the model, as transformers stores it.

    Attributes:
        context: most tokens of a sequence.
        ends: tokens that end a text.
    Raises:
        UserError: the folder has no tokenizer, or a package is missing.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415 - an extra
            from tokenizers import Tokenizer  # noqa: PLC0415 - an extra

            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except ImportError as error:
            raise UserError("generation requires: pip install 'multiworld-serving[generate]'") from error
        except Exception as error:  # tokenizers raises Exception itself
            raise UserError(
                f"{folder / 'tokenizer.json'} cannot be read: {error}; a frontend needs the folder, too"
            ) from error
        config, own, generation = (
            _json(folder / name) for name in ("config.json", "tokenizer_config.json", "generation_config.json")
        )
        self.context = int(config.get("max_position_embeddings") or config.get("n_positions") or _UNKNOWN_CONTEXT)
        end = generation.get("eos_token_id", config.get("eos_token_id"))
        self.ends = frozenset(end if isinstance(end, list) else [] if end is None else [end])
        self._names = {name: _token(own.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        file = folder / "chat_template.jinja"
        given = file.read_text("utf-8") if file.exists() else own.get("chat_template")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(given) if isinstance(given, str) else None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokenize a text. `special` adds the tokens that mark the beginning of a text."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without the special ones."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation. Raises InvalidInputError if there is no template, or it does not accept the messages."""
        if self._template is None:
            raise InvalidInputError("the model has no chat template; use /v1/completions")
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, **self._names)
        except Exception as error:  # templates raise anything
            raise InvalidInputError(f"the chat template does not accept the messages: {error}") from error
        return self.encode(text, special=False)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _token(given: Any) -> str:
    return str(given.get("content", "")) if isinstance(given, dict) else str(given or "")


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)
