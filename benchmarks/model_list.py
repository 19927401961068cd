"""The models of `served_models`: how each is made, with random weights, and what it takes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from multiworld_serving.models.export.sources import load_module
from multiworld_serving.models.export.trace import Dynamic

_SIDE = 64
_PIXELS = (3, _SIDE, _SIDE)
_FIXED_PIXELS = (3, 224, 224)
_VOCABULARY = 100
_TOKENS = 12
"""In each text that is sent. Models with a mask take from 2 to `_MAX_TOKENS`."""
_MAX_TOKENS = 32


@dataclass(frozen=True)
class TestedModel:
    """A model to export and serve.

    Attributes:
        make: returns the module in eval mode.
        shapes: of one row of each input, by name. Inputs named `input_ids` are tokens, `attention_mask` is 0 or 1, others are normal
            numbers.
    """

    library: str
    make: Callable[[], nn.Module]
    shapes: Mapping[str, tuple[int, ...]]
    dynamic: tuple[Dynamic, ...] = field(default=())

    def rows(self, count: int) -> dict[str, Tensor]:
        """Random inputs of this many rows, the same in every call."""
        generator = torch.Generator().manual_seed(1)
        return {name: _values(name, (count, *shape), generator) for name, shape in self.shapes.items()}

    @property
    def size(self) -> str:
        """Shapes of the inputs, for people."""
        shown = [" x ".join(map(str, shape)) for shape in dict.fromkeys(self.shapes.values())]
        least_most = "".join(f" ({each.least} to {each.most})" for each in self.dynamic)
        return ", ".join(shown) + (" tokens" + least_most if "input_ids" in self.shapes else "")


def _values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name == "input_ids":
        return torch.randint(_VOCABULARY, shape, generator=generator)
    if name == "attention_mask":
        mask = torch.ones(shape, dtype=torch.int64)
        mask[1::2, -3:] = 0  # every second text is shorter
        return mask
    return torch.randn(shape, generator=generator)


def _torchvision(name: str, *shapes: tuple[int, ...]) -> TestedModel:
    names = ["images"] if len(shapes) < 2 else [f"images_{number}" for number in range(len(shapes))]
    return TestedModel("torchvision", lambda: load_module(name), dict(zip(names, shapes or (_PIXELS,), strict=True)))


def _timm(name: str, side: int) -> TestedModel:
    def make() -> nn.Module:
        model: nn.Module = importlib.import_module("timm").create_model(name, pretrained=False)
        return model.eval()

    return TestedModel("timm", make, {"images": (3, side, side)})


def _transformers(
    model: str,
    config: str,
    shapes: Mapping[str, tuple[int, ...]],
    settings: Mapping[str, Any],
    dynamic: tuple[Dynamic, ...] = (),
) -> TestedModel:
    def make() -> nn.Module:
        library = importlib.import_module("transformers")
        made: nn.Module = getattr(library, model)(getattr(library, config)(**settings))
        return made.eval()

    return TestedModel("transformers", make, shapes, dynamic)


_TEXT = {"input_ids": (_TOKENS,), "attention_mask": (_TOKENS,)}
_ANY_LENGTH = (Dynamic((("input_ids", 1), ("attention_mask", 1)), 2, _MAX_TOKENS),)
_SMALL: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}

MODELS: dict[str, TestedModel] = {
    **{
        name: _torchvision(name)
        for name in (
            *("alexnet", "convnext_tiny", "deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "densenet121"),
            *("efficientnet_b0", "efficientnet_v2_s", "fcn_resnet50", "googlenet", "lraspp_mobilenet_v3_large"),
            *("mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18"),
            *("resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11"),
            "wide_resnet50_2",
        )
    },
    "inception_v3": _torchvision("inception_v3", (3, 96, 96)),
    "vit_b_16": _torchvision("vit_b_16", _FIXED_PIXELS),
    "maxvit_t": _torchvision("maxvit_t", _FIXED_PIXELS),
    "r3d_18": _torchvision("r3d_18", (3, 4, _SIDE, _SIDE)),
    "swin3d_t": _torchvision("swin3d_t", (3, 4, _SIDE, _SIDE)),
    "raft_small": _torchvision("raft_small", (3, 128, 128), (3, 128, 128)),
    "ssdlite320_mobilenet_v3_large": _torchvision("ssdlite320_mobilenet_v3_large", (3, 320, 320)),
    "convnextv2_atto": _timm("convnextv2_atto", _SIDE),
    "deit_tiny_patch16_224": _timm("deit_tiny_patch16_224", 224),
    "efficientnet_lite0": _timm("efficientnet_lite0", _SIDE),
    "ghostnet_100": _timm("ghostnet_100", _SIDE),
    "mixer_s32_224": _timm("mixer_s32_224", 224),
    "mobilevit_xxs": _timm("mobilevit_xxs", _SIDE),
    "repvgg_a0": _timm("repvgg_a0", _SIDE),
    "resnet26d": _timm("resnet26d", _SIDE),
    "bert": _transformers("BertForSequenceClassification", "BertConfig", _TEXT, _SMALL, _ANY_LENGTH),
    "distilbert": _transformers(
        *("DistilBertForSequenceClassification", "DistilBertConfig", _TEXT),
        {"vocab_size": _VOCABULARY, "dim": 64, "n_layers": 4, "n_heads": 4, "hidden_dim": 128},
        _ANY_LENGTH,
    ),
    "gpt2": _transformers(
        *("GPT2LMHeadModel", "GPT2Config", {"input_ids": (_TOKENS,)}),
        {"vocab_size": _VOCABULARY, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "use_cache": False},
    ),
    "t5_encoder": _transformers(
        *("T5EncoderModel", "T5Config", _TEXT),
        {"vocab_size": _VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 4, "num_heads": 4},
    ),
    "vit": _transformers(
        *("ViTForImageClassification", "ViTConfig", {"pixel_values": _PIXELS}),
        {key: value for key, value in _SMALL.items() if key not in ("vocab_size", "max_position_embeddings")}
        | {"image_size": _SIDE, "patch_size": 16},
    ),
    "whisper_encoder": _transformers(
        *("WhisperForAudioClassification", "WhisperConfig", {"input_features": (80, 200)}),
        {"d_model": 64, "encoder_layers": 4, "encoder_attention_heads": 4, "encoder_ffn_dim": 128}
        | {"max_source_positions": 100, "vocab_size": _VOCABULARY, "pad_token_id": 0, "decoder_layers": 1},
    ),
}
