"""What a world is made of."""

from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import Store

from multiworld.rendezvous import Pulse


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig:
    """

    Attributes:
        rank, size: this member's rank, and how many members there are.
        epoch: which incarnation of `name`; 0 lets rank 0 decide.
        addr, port: where rank 0 listens; the others connect there.
        bind_host: the address of this machine that our connections leave from; empty lets the kernel choose.
        timeout_s: how long forming the world may take.
        store: use this store for the rendezvous instead of the lifeline (a `TCPStore`, say).
        checked: agree on every operation before its data moves (multiworld/agreement.py). The same at all members.
    """

    name: str
    rank: int
    size: int
    epoch: int
    backends: dict[str, str]
    device: torch.device
    addr: str
    port: int
    secret: bytes
    pulse: Pulse
    timeout_s: float
    store: Store | None = None
    checked: bool = False
    bind_host: str = ""
