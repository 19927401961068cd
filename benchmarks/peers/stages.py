"""The model of the peers as stages in Python of this service: `text_1` in one stage, `text_2` in two, and so for `resnet18`."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.peers.model import MAX_BATCH_SIZE, classifier
from multiworld_serving import Request, Stage


class _Part(Stage):
    model = "resnet18"
    max_batch_size = MAX_BATCH_SIZE

    def setup(self, device: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            chosen = argparse.Namespace(model=self.model, threads=1, device=device, pids=Path(folder))
            self.classifier = classifier(chosen)


class Decode(_Part):
    def __call__(self, requests: Sequence[Request]) -> list[Tensor]:
        return [self.classifier.tensor(each.body) for each in requests]


class Classify(_Part):
    def __call__(self, rows: Sequence[Tensor]) -> list[Any]:
        return [*self.classifier.classify(rows)]


class Whole(_Part):
    def __call__(self, requests: Sequence[Request]) -> list[Any]:
        return [*self.classifier.classify([self.classifier.tensor(each.body) for each in requests])]


class Tokenize(Decode):
    model = "text"


class Encode(Classify):
    model = "text"


class WholeText(Whole):
    model = "text"


resnet18_1, resnet18_2 = [Whole], [Decode, Classify]
text_1, text_2 = [WholeText], [Tokenize, Encode]
