"""Damages JSON documents at random."""

import copy
import random
from collections.abc import Sequence
from typing import Any


def damaged(document: Any, values: Sequence[Any], chance: random.Random) -> Any:
    """A copy in which one or two parts, at any depth, are replaced by one of these values."""
    made = copy.deepcopy(document)
    for _ in range(chance.randint(1, 2)):
        place: Any = made
        while isinstance(place, list | dict) and place:
            key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if chance.random() < 0.4 or not isinstance(place[key], list | dict):
                place[key] = copy.deepcopy(chance.choice(values))
                break
            place = place[key]
    return made
