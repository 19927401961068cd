"""Turns texts into tokens as BERT does (lower case, the longest known parts of each word), and probabilities into labels."""

import json
import re
from pathlib import Path

import numpy as np

PARTS = Path(__file__).with_name("vocabulary.txt").read_text().split()
NUMBERS = {part: number for number, part in enumerate(PARTS)}
LABELS = ("negative", "positive")
MAX_TOKENS = 64


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


class Handler:
    """One text per line in, one JSON object per text out."""

    def decode(self, body: bytes, content_type: str) -> dict[str, np.ndarray]:
        texts = [tokens(line) for line in body.decode("utf-8").splitlines() if line.strip()]
        if not texts:
            raise ValueError("the body has no text; expected one text per line")
        ids = np.full((len(texts), max(map(len, texts))), NUMBERS["[PAD]"], dtype=np.int64)
        for row, numbers in zip(ids, texts, strict=True):
            row[: len(numbers)] = numbers
        return {"ids": ids, "mask": ids != NUMBERS["[PAD]"]}

    def encode(self, outputs: dict[str, np.ndarray]) -> tuple[bytes, str]:
        answers = [dict(zip(LABELS, map(float, row), strict=True)) for row in outputs["output"]]
        return json.dumps(answers).encode(), "application/json"
