"""Models as transformers stores them: a folder with `config.json` and safetensors, or a name that transformers downloads.

The architecture in `config.json` determines the inputs: token ids of variable length, or images as its image processor prepares them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.transforms.functional import center_crop

from multiworld_serving.models.errors import ExportError, LabelsError, WeightsError
from multiworld_serving.models.export.exporter import ExportSettings
from multiworld_serving.models.export.refusals import IN_PYTHON
from multiworld_serving.models.export.sources import EXAMPLE_ROWS
from multiworld_serving.models.export.trace import Dynamic
from multiworld_serving.models.preprocessing import Normalize, Preprocessing

PREFIX = "hf:"
"""How a source of `multiworld export` begins."""
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForImageClassification")
_TASKS = (*_CLASSIFIERS, "ForQuestionAnswering", "ForMaskedLM", "Model")
"""How names of supported architectures end. "Model" is an encoder."""
_TEXT, _IMAGES = ("input_ids", "attention_mask", "token_type_ids"), ("pixel_values",)
_NAMES = """
attention_mask position_ids head_mask inputs_embeds labels start_positions end_positions output_attentions output_hidden_states return_dict
use_cache past_key_values cache cache_position logits_to_keep encoder_hidden_states encoder_attention_mask
bool_masked_pos interpolate_pos_encoding self
"""
_WITH_DEFAULTS = frozenset(_NAMES.split())
"""Parameters that may be left out. Without others, such as the boxes of words, a model computes something else."""
_LONGEST = 512
"""Tokens, if the model supports more. Memory of attention grows with the square."""
_EXAMPLE_TOKENS = 8
_PROCESSOR_TOLERANCE = 1e-4


def load_model(place: str, settings: ExportSettings) -> tuple[nn.Module, dict[str, Tensor], ExportSettings]:
    """Load a model. Blocks: reads files, and downloads what is not a folder.

    Args:
        settings: `dynamic` may be the number of tokens. By default it is 1 to what the model supports, at most `_LONGEST`.
    Returns:
        A module that takes tensors by position and returns a dict of outputs, an example of its inputs by name, and the settings with the
        inputs, the preprocessing of images, and the labels of a classifier. Its output is `probabilities`.
    Raises:
        ExportError: transformers is not installed or cannot load the model, or its task or preprocessing is not supported.
        WeightsError: the files lack weights of the model.
        LabelsError: `id2label` does not have one label per class.
    """
    transformers = _transformers()
    config = _loaded(place, transformers.AutoConfig)
    architecture = (config.architectures or ["none"])[0]
    kind = getattr(transformers, architecture, None)
    if kind is None or not architecture.endswith(_TASKS) or architecture.endswith("LMHeadModel"):
        raise ExportError(
            f"the architecture of {place} is {architecture}; expected one of transformers that ends with {', '.join(_TASKS)}; {IN_PYTHON}"
        )
    parameters = _inputs(kind, config)
    labels, activation = _labels(config) if architecture.endswith(_CLASSIFIERS) else ((), None)
    image = _preprocessing(_loaded(place, transformers.AutoImageProcessor)) if parameters == _IMAGES else None
    config.use_cache = False
    model, info = _loaded(
        place, kind, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):
        if not all(key.startswith("pooler.") for key in missing):
            raise WeightsError(
                f"the weights of {place} lack {missing[0]!r} of {architecture}; expected weights of all layers: train the model, and write "
                "it with save_pretrained"
            )
        model.pooler = None
    dynamic = settings.dynamic
    if image is not None:
        example = {"images": torch.zeros(EXAMPLE_ROWS, 3, image.crop_size, image.crop_size)}
    else:
        dynamic = dynamic or (Dynamic(tuple((name, 1) for name in parameters), 1, _longest(model)),)
        length = min(max(dynamic[0].least, _EXAMPLE_TOKENS), dynamic[0].most)
        example = {name: each for name, each in _tokens(config.vocab_size, length).items() if name in parameters}
    settings = replace(settings, inputs=tuple(example), dynamic=dynamic, image=image, labels=labels, logits=False)
    return _Task(model, parameters, activation), example, settings


class _Task(nn.Module):
    """Takes the inputs by position, and returns the tensors of the output by name: the probabilities if there is an activation."""

    def __init__(
        self, model: nn.Module, parameters: Sequence[str], activation: Callable[[Tensor], Tensor] | None
    ) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self._names, self._activation = parameters, activation

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        found = self.model(**dict(zip(self._names, tensors, strict=True)), return_dict=True)
        if self._activation is not None:
            return {"probabilities": self._activation(found["logits"])}
        return {name: each for name, each in found.items() if isinstance(each, Tensor)}


def _transformers() -> Any:
    try:
        import transformers  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ExportError(f"{PREFIX} needs transformers: pip install 'multiworld-serving[hf]' ({error})") from error
    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    return transformers


def _loaded(place: str, kind: Any, **options: Any) -> Any:
    """What `from_pretrained` returns. It never runs code that comes with the model. Raises ExportError."""
    try:
        return kind.from_pretrained(place, trust_remote_code=False, **options)
    except Exception as error:  # files, network, a damaged file, an unknown architecture, a missing package
        raise ExportError(
            f"{place} cannot be loaded: {' '.join(str(error).split())[:400]}; expected a folder as save_pretrained writes it (config.json, "
            "model.safetensors, and preprocessor_config.json for images), or a name that can be downloaded; check the path or name"
        ) from error


def _inputs(kind: Any, config: Any) -> tuple[str, ...]:
    """The parameters of the model that get tensors. Raises ExportError if it has others than those of texts or images."""
    signature = inspect.signature(kind.forward).parameters.items()
    parameters = {name for name, each in signature if each.kind is not each.VAR_KEYWORD}
    known = _IMAGES if kind.main_input_name in _IMAGES else _TEXT
    if others := sorted(parameters.difference(known, _WITH_DEFAULTS)):
        raise ExportError(
            f"{kind.__name__} takes {', '.join(others)}; expected a model with one text or image as its only input; {IN_PYTHON}"
        )
    unused = set() if getattr(config, "type_vocab_size", 0) > 1 else {"token_type_ids"}
    return tuple(name for name in known if name in parameters - unused)


def _labels(config: Any) -> tuple[tuple[str, ...], Callable[[Tensor], Tensor] | None]:
    """The labels of a classifier and what turns its logits into probabilities. A regression has neither."""
    if config.num_labels == 1 or config.problem_type == "regression":
        return (), None
    if sorted(config.id2label) != list(range(config.num_labels)):
        raise LabelsError("id2label in config.json does not have the keys 0, 1, …; expected one label for each class")
    labels = tuple(str(config.id2label[index]) for index in range(config.num_labels))
    return labels, torch.sigmoid if config.problem_type == "multi_label_classification" else nn.Softmax(dim=-1)


def _longest(model: nn.Module) -> int:
    """The number of tokens for which the model has positions, at most `_LONGEST`."""
    most: int = getattr(model.config, "max_position_embeddings", None) or _LONGEST
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding) and each.num_embeddings == most]
    skipped = [each.padding_idx + 1 for each in tables if each.padding_idx is not None]  # RoBERTa's first positions
    return min(most - max(skipped, default=0), _LONGEST)


def _tokens(vocabulary: int, length: int) -> dict[str, Tensor]:
    """An example of texts, a quarter of the last one padded."""
    generator, mask = torch.Generator().manual_seed(0), torch.ones(EXAMPLE_ROWS, length, dtype=torch.int64)
    mask[-1, length - length // 4 :] = 0
    ids, types = (torch.randint(most, mask.shape, generator=generator) for most in (vocabulary, 2))
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def _preprocessing(processor: Any) -> Preprocessing:
    """The preprocessing of an image processor. Raises ExportError if it does something else to square images."""
    side = max(filter(None, dict(processor.size).values()))
    crop = max(dict(processor.crop_size).values()) if getattr(processor, "do_center_crop", False) else side
    channels: list[Any] = [(0.0,) * 3, (1.0,) * 3]
    if getattr(processor, "do_normalize", False):
        channels = [tuple(processor.image_mean), tuple(processor.image_std)]
    for resize in (side, int(side / (getattr(processor, "crop_pct", None) or 1))):
        picture = torch.randint(256, (3, resize, resize), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        found = processor(picture, return_tensors="pt")["pixel_values"]
        expected = Normalize(*channels)(center_crop(picture, [crop])[None])
        if found.shape == expected.shape and torch.allclose(found, expected, atol=_PROCESSOR_TOLERANCE):
            return Preprocessing(resize, crop, *channels)
    raise ExportError(
        f"{type(processor).__name__} prepares images in another way than the service: expected to resize, crop the center square, rescale "
        f"by 1/255 and normalize; {IN_PYTHON}"
    )
