"""Weights of a model: checkpoint files, class labels, and weights that a worker has received."""

from multiworld_serving.models.errors import WeightsError

SUFFIXES = (".pth", ".pt", ".ckpt", ".safetensors")
"""Endings of the names of files with weights."""
_MAX_SEED = 2**63 - 1


def parse_seed(text: str) -> int:
    """The seed in "random:SEED".

    Raises:
        WeightsError: the seed is not a whole number from 0 to 2**63 - 1.
    """
    digits = text.removeprefix("random").removeprefix(":")
    if not (digits.isascii() and digits.isdecimal()) or int(digits[:20]) > _MAX_SEED:
        raise WeightsError(f"weights {text!r} have no valid seed; expected random:SEED with a number, such as random:0")
    return int(digits)
