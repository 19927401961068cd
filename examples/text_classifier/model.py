"""A classifier of texts with the architecture of BERT, in a small configuration."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

VOCABULARY = Path(__file__).with_name("vocabulary.txt")
MAX_TOKENS = 64


class Layer(nn.Module):
    """Attention of every token to all tokens that are not padding, and two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, hidden: Tensor, allowed: Tensor) -> Tensor:
        """[B,L,width] of [B,L,width], and a mask bool [B,1,1,L] of the tokens that are not padding."""
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, dim=2))
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2).flatten(2)
        hidden = self.norms[0](hidden + self.out(mixed))
        output: Tensor = self.norms[1](hidden + self.shrink(gelu(self.grow(hidden))))
        return output


class TextClassifier(nn.Module):
    """Embeddings of tokens and positions, layers, and a linear layer on the first token."""

    def __init__(self, words: int, width: int = 64, heads: int = 4, layers: int = 4, classes: int = 2) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(MAX_TOKENS, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Probabilities float32 [B,classes] of ids int64 [B,L] with a mask bool [B,L], false for padding."""
        hidden = self.norm(self.words(ids) + self.positions.weight[: ids.shape[1]])
        allowed = mask[:, None, None, :]
        for layer in self.layers:
            hidden = layer(hidden, allowed)
        probabilities: Tensor = self.head(hidden[:, 0]).softmax(1)
        return probabilities


def make() -> TextClassifier:
    """Random weights."""
    torch.manual_seed(0)
    return TextClassifier(len(VOCABULARY.read_text().split()))


def example() -> dict[str, Tensor]:
    """Two texts of six tokens."""
    ids = torch.arange(12).view(2, 6)
    return {"ids": ids, "mask": ids >= 0}
