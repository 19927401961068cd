"""Classifies texts: a tokenizer, a bundle in two stages, and labels."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multiworld_serving import Bundle, InvalidInput, Request, Stage

PARTS = Path(__file__).with_name("vocabulary.txt").read_text().split()
NUMBERS = {part: number for number, part in enumerate(PARTS)}
LABELS = ("negative", "positive")
MAX_TOKENS = 64


class Tokenize(Stage):
    """Turns a text into tokens as BERT does: lower case, the longest known parts of each word."""

    def __call__(self, requests: Sequence[Request]) -> list[Any]:
        return [self.encoded(each.text) for each in requests]

    def encoded(self, text: str) -> dict[str, Any]:
        if not text.strip():
            raise InvalidInput("the body has no text")
        ids = tokens(text)
        return {"ids": ids, "mask": [True] * len(ids)}


class Label(Stage):
    def __call__(self, rows: Sequence[dict[str, Any]]) -> list[Any]:
        return [dict(zip(LABELS, each["output"].tolist(), strict=True)) for each in rows]


def tokens(text: str) -> list[int]:
    """The numbers of the parts of all words, between [CLS] and [SEP]."""
    found = [number for word in re.findall(r"\w+", text.lower()) for number in _parts(word)]
    return [NUMBERS["[CLS]"], *found[: MAX_TOKENS - 2], NUMBERS["[SEP]"]]


def _parts(word: str) -> list[int]:
    found, at = [], 0
    while at < len(word):
        prefix = "##" if at else ""
        known = (end for end in range(len(word), at, -1) if prefix + word[at:end] in NUMBERS)
        if (end := next(known, 0)) == 0:
            return [NUMBERS["[UNK]"]]
        found.append(NUMBERS[prefix + word[at:end]])
        at = end
    return found


pipeline = [Tokenize, Bundle("texts.bundle", stages=2, pad={"ids": 0, "mask": 0}), Label]
