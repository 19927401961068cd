"""Names a flower by the lengths of its leaves: one stage with scikit-learn, without torch."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

from multiworld_serving import Request, Stage


class Flower(msgspec.Struct):
    """Centimeters."""

    sepal_length: float
    sepal_width: float
    petal_length: float
    petal_width: float


class Name(Stage):
    request = Flower

    def setup(self, device: str) -> None:
        self.data = load_iris()
        self.model = LogisticRegression(max_iter=1000).fit(self.data.data, self.data.target)

    def __call__(self, requests: Sequence[Request]) -> list[Any]:
        rows = np.array([msgspec.structs.astuple(each.json()) for each in requests])
        names = self.data.target_names[self.model.predict(rows)]
        return [{"name": str(name), "probability": best} for name, best in zip(names, self._best(rows), strict=True)]

    def _best(self, rows: np.ndarray) -> list[float]:
        found: list[float] = self.model.predict_proba(rows).max(1).round(6).tolist()
        return found

    def example(self) -> list[Request]:
        return [Request(b'{"sepal_length": 5, "sepal_width": 3, "petal_length": 1, "petal_width": 0.2}')]


pipeline = [Name]
path = "/flowers"
