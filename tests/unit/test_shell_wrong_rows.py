"""A worker that answers with another number of rows than it was sent."""

import asyncio
import time
from dataclasses import dataclass, field

import pytest
import torch
from pydantic import SecretStr
from torch import Tensor

from server.metrics import Metrics
from server.scheduling.events import LinkBroken, LinkReady
from server.settings import ServeSettings
from server.shell import Shell, Surroundings
from server.slots import Slot
from wire import Kind, Message, WireError


@dataclass
class Line:
    """A link as the shell sees it, without a world."""

    slot: Slot
    id: str = ""
    state: str = "ready"
    stage: int = 0
    epoch: int = 1
    sent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world_name, self.id = self.slot.name, f"{self.slot.name}#1"

    def send(self, batch: int, payload: Tensor, version: int, traced: object = ()) -> None:
        self.sent.append(batch)


@pytest.mark.parametrize("rows", [0, 1, 3])
async def test_batch_goes_elsewhere_when_it_comes_back_with_other_rows(rows: int) -> None:
    settings = ServeSettings(
        token=SecretStr("a-secret-of-this-test"), join_port=0, batching="fixed", batch_timeout_s=0.05
    )
    lines = {line.id: line for line in (Line(Slot(0, 0)), Line(Slot(0, 1)))}
    around = Surroundings("resnet18", lambda _: 1, lines.get, lambda _: None, lambda: None)  # type: ignore[arg-type]
    shell = Shell(settings, 1, Metrics(), around)
    for line in lines.values():
        shell.feed(LinkReady(f"{line.id}@v", 0, "v"))
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    deadline_s = time.monotonic() + 60
    asking = [asyncio.create_task(shell.predict(image, deadline_s=deadline_s, request_id=str(n))) for n in range(2)]
    async with asyncio.timeout(30):
        while not any(line.sent for line in lines.values()):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
    (liar,) = [line for line in lines.values() if line.sent]
    (other,) = [line for line in lines.values() if not line.sent]
    with pytest.raises(WireError, match=f"of 2 rows came back with {rows}"):
        shell.on_result(liar, Message(Kind.RESULT, liar.sent[0], torch.rand(rows, 10)))  # type: ignore[arg-type]
    liar.state = "broken"
    shell.on_ended(liar)  # type: ignore[arg-type]
    shell.feed(LinkBroken(f"{liar.id}@v", "error"))
    assert other.sent == liar.sent
    answer = torch.rand(2, 10)
    shell.on_result(other, Message(Kind.RESULT, other.sent[0], answer))  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        for row, prediction in enumerate(await asyncio.gather(*asking)):
            assert torch.equal(prediction.probabilities, answer[row])
    shell.close()
