"""The keys and values of the sequences in one stage of a decoder, behind the `Cache` interface of transformers."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

IDLE_S = 30.0
"""Time after which an unused session is dropped if another one needs its room. Its frontend is gone, or has begun a new session after a
loss in another stage. If the frontend continues the dropped session, it begins a new one."""


@dataclass(eq=False)
class Session:
    """One sequence.

    Attributes:
        capacity: most tokens that it may have.
        length: tokens that it has.
        kept: by layer, keys and values [heads, capacity, dim].
    """

    capacity: int
    length: int = 0
    used_s: float = 0.0
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values [heads, new, dim] of new tokens. Returns all of them, [heads, tokens, dim]."""
        if layer not in self.kept:
            shapes = [(each.shape[0], self.capacity, each.shape[2]) for each in (key, value)]
            self.kept[layer] = (key.new_empty(shapes[0]), value.new_empty(shapes[1]))
        end = self.length + key.shape[1]
        keys, values = self.kept[layer]
        keys[:, self.length : end] = key
        values[:, self.length : end] = value
        return keys[:, :end], values[:, :end]


class Sessions:
    """The sessions of a stage, within a number of tokens.

    Args:
        max_tokens: of the capacities of all sessions together.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._open: OrderedDict[str, Session] = OrderedDict()
        """By id, least recently used first."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def reserved_tokens(self) -> int:
        """The capacities of all sessions together."""
        return sum(each.capacity for each in self._open.values())

    def find(self, name: str, position: int) -> Session | None:
        """The session that has exactly the tokens before this position; None if there is none: it is lost, or was ahead of its frontend."""
        session = self._open.get(name)
        if session is None or session.length != position:
            return None
        session.used_s = time.monotonic()
        self._open.move_to_end(name)
        return session

    def open(self, name: str, capacity: int) -> Session | None:
        """A new session; None if there is no room for so many tokens. A session with this name is replaced."""
        now_s = time.monotonic()
        self._open.pop(name, None)
        while self.reserved_tokens + capacity > self._max_tokens:
            if not self._open or next(iter(self._open.values())).used_s > now_s - IDLE_S:
                return None
            self._open.popitem(last=False)
        session = self._open[name] = Session(capacity, used_s=now_s)
        return session

    def close(self, name: str) -> None:
        """Free a session."""
        self._open.pop(name, None)


def batch_cache(sessions: Sequence[Session], counts: Sequence[int]) -> Any:
    """A `Cache` of transformers over the sessions of one batch: appends the new tokens of each row, and returns padded keys and values.

    Args:
        counts: new tokens of each row.
    """
    from transformers.cache_utils import Cache  # noqa: PLC0415 - an extra

    class BatchCache(Cache):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(layers=[])

        def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            rows = [
                session.append(layer_idx, key[row, :, :count], value[row, :, :count])
                for row, (session, count) in enumerate(zip(sessions, counts, strict=True))
            ]
            if len(rows) == 1:
                return rows[0][0][None], rows[0][1][None]
            return _padded([keys for keys, _ in rows]), _padded([values for _, values in rows])

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return max(session.length for session in sessions)

        def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
            return max(map(sum, zip((each.length for each in sessions), counts, strict=True))), 0

        @property
        def is_compileable(self) -> bool:
            return False

        @property
        def is_sliding(self) -> list[bool]:
            return [False]

        def __len__(self) -> int:
            return 0

    return BatchCache()


def _padded(rows: Sequence[Tensor]) -> Tensor:
    """[batch, heads, longest, dim] of tensors [heads, tokens, dim]."""
    return nn.utils.rnn.pad_sequence([each.transpose(0, 1) for each in rows], batch_first=True).transpose(1, 2)


def mask_of(positions: Tensor, longest: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """The attention mask [batch, 1, new, longest] of rows whose new tokens have these positions [batch, new]: 0, or the lowest number."""
    keys = torch.arange(longest, device=positions.device)
    seen = keys[None, None, :] <= positions[:, :, None]
    if window is not None:
        seen &= keys[None, None, :] > positions[:, :, None] - window
    lowest = torch.finfo(dtype).min
    return torch.where(seen, 0.0, lowest)[:, None].to(dtype)
