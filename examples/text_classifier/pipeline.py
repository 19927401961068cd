"""Classifies texts: a tokenizer, a bundle in two stages, and labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import BertWordPieceTokenizer

from multiworld_serving import Bundle, InvalidInput, Request, Stage

VOCABULARY = Path(__file__).with_name("vocabulary.txt")
LABELS = ("negative", "positive")
MAX_TOKENS = 64


class Tokenize(Stage):
    """Turns a text into tokens as BERT does."""

    def setup(self, device: str = "cpu") -> None:
        self.tokenizer = BertWordPieceTokenizer(str(VOCABULARY), lowercase=True)
        self.tokenizer.enable_truncation(MAX_TOKENS)

    def __call__(self, requests: Sequence[Request]) -> list[Any]:
        return [self.row(each.text) for each in requests]

    def row(self, text: str) -> dict[str, list[Any]]:
        if not text.strip():
            raise InvalidInput("the body has no text")
        ids = self.tokenizer.encode(text).ids
        return {"ids": ids, "mask": [True] * len(ids)}

    def example(self) -> list[Request]:
        return [Request(b"a text")]


class Label(Stage):
    def __call__(self, rows: Sequence[dict[str, Any]]) -> list[Any]:
        return [dict(zip(LABELS, each["output"].tolist(), strict=True)) for each in rows]


pipeline = [Tokenize, Bundle("texts.bundle", stages=2, pad={"ids": 0, "mask": 0}), Label]
