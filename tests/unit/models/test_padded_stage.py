"""Batches are padded to the next size that a compiled stage supports."""

import torch
from torch import Tensor

from multiworld_serving.models import split_model
from multiworld_serving.models.optimize.padded_stage import PaddedStage, batch_sizes
from tests.unit.models.models_loaded import loaded


def test_batch_is_padded_to_the_next_size_and_its_own_rows_are_returned() -> None:
    ran: list[int] = []

    def run(batch: Tensor) -> Tensor:
        ran.append(len(batch))
        return batch + 1

    stage = PaddedStage(split_model(loaded("resnet18"), 10)[3], dict.fromkeys(batch_sizes(6), run))
    for rows, size in {1: 1, 2: 2, 3: 4, 4: 4, 5: 6, 6: 6}.items():
        batch = torch.rand(rows, 2)
        assert torch.equal(stage(batch), batch + 1)
        assert ran[-1] == size
