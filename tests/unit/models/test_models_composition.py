"""Composed stages equal the unsplit model bit for bit."""

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torchvision.models import ResNet18_Weights

from multiworld_serving.models import (
    MODEL_NAMES,
    LoadedModel,
    ModelError,
    Reference,
    Stage,
    StageError,
    StageSpec,
    build_stage,
    load_model,
    reference_stage,
    split_model,
    stage_input_dtype,
    stage_input_shape,
    stage_output_shape,
    stage_weights,
)
from tests.unit.models.models_loaded import IMAGE_SIZE, images, loaded


def worker_stage(model: LoadedModel, spec: StageSpec) -> Stage:
    """The stage that a worker builds from the description and the weights that it receives."""
    stage = build_stage(StageSpec.from_json(spec.to_json()))
    stage.load_state_dict(stage_weights(model, spec), strict=True)
    return stage


@torch.inference_mode()
def compose(model: LoadedModel, specs: list[StageSpec], batch: Tensor) -> Tensor:
    """Run `batch` through all stages and check the declared shapes on the way."""
    for spec in specs:
        stage = worker_stage(model, spec)
        assert tuple(batch.shape[1:]) == stage_input_shape(spec, IMAGE_SIZE)
        assert batch.dtype == stage_input_dtype(spec)
        before = batch.clone()
        output = stage(batch)
        assert torch.equal(batch, before), "a stage wrote to its input, which the leader keeps for rerouting"
        assert tuple(output.shape[1:]) == stage_output_shape(spec, IMAGE_SIZE)
        assert output.dtype == torch.float32
        assert output.is_contiguous()
        batch = output
    return batch


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_composed_stages_equal_the_reference_bit_for_bit(name: str) -> None:
    model = loaded(name)
    batch = images(2)
    with torch.inference_mode():
        expected = Reference(model)(batch)
    for num_stages in range(1, 7):
        specs = split_model(model, num_stages)
        assert len(specs) == num_stages
        assert torch.equal(compose(model, specs, batch), expected), f"{num_stages} stages"


def test_composed_stages_equal_the_reference_when_every_block_is_a_stage() -> None:
    model = loaded("resnet18")
    batch = images(1)
    specs = split_model(model, 10)
    with torch.inference_mode():
        assert torch.equal(compose(model, specs, batch), Reference(model)(batch))


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_random_weights_give_probabilities_that_depend_on_the_image(name: str) -> None:
    with torch.inference_mode():
        probabilities = Reference(load_model(name, "random:0"))(images(3))
    assert torch.allclose(probabilities.sum(dim=1), torch.ones(3))
    assert float(probabilities.max()) < 0.99
    assert float(probabilities.max(dim=1).values.min()) > 2 / 1000
    assert float((probabilities[0] - probabilities[1]).abs().max()) > 1e-3


def test_reference_equals_torchvision_transform_and_softmax() -> None:
    model = load_model("resnet18", "random:1")
    batch = images(2, size=224)
    normalised = ResNet18_Weights.IMAGENET1K_V1.transforms(resize_size=224)(batch)
    with torch.inference_mode():
        assert torch.equal(Reference(model)(batch), model.module(normalised).softmax(dim=1))


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("size", [1, 31, 33, 97])
def test_declared_shapes_equal_those_of_a_run_with_an_odd_size(name: str, size: int) -> None:
    model = loaded(name)
    batch = images(1, size=size) if size >= 4 else torch.zeros(1, 3, size, size, dtype=torch.uint8)
    with torch.inference_mode():
        for spec in split_model(model, 6):
            assert tuple(batch.shape[1:]) == stage_input_shape(spec, size)
            batch = reference_stage(model, spec)(batch)
            assert tuple(batch.shape[1:]) == stage_output_shape(spec, size)


def test_state_dicts_have_torchvision_names_and_are_disjoint() -> None:
    model = loaded("resnet50")
    whole = model.module.state_dict()
    parts = [stage_weights(model, spec) for spec in split_model(model, 4)]
    names = [name for part in parts for name in part]
    assert names == list(whole)
    assert all(torch.equal(part[name], whole[name]) for part in parts for name in part)
    assert "layer1.0.conv1.weight" in names
    assert "bn1.num_batches_tracked" in names


def test_stage_weights_survive_safetensors() -> None:
    model = loaded("resnet18")
    for spec in split_model(model, 3):
        weights = stage_weights(model, spec)
        received = safetensors.torch.load(safetensors.torch.save(weights))
        assert received.keys() == weights.keys() == build_stage(spec).state_dict().keys()
        assert all(torch.equal(received[name], tensor) for name, tensor in weights.items())


def test_built_stages_share_no_memory() -> None:
    model = loaded("resnet18")
    spec = split_model(model, 2)[1]
    first, second = worker_stage(model, spec), build_stage(spec)
    for tensor in second.state_dict().values():
        tensor.zero_()
    assert torch.equal(first.get_parameter("fc.weight"), model.module.get_parameter("fc.weight"))


def test_stage_loading_fails_when_a_weight_is_missing_or_misshapen() -> None:
    model = loaded("resnet18")
    spec = split_model(model, 2)[1]
    weights = stage_weights(model, spec)
    missing = {name: tensor for name, tensor in weights.items() if name != "fc.bias"}
    with pytest.raises(RuntimeError, match=r"fc\.bias"):
        build_stage(spec).load_state_dict(missing, strict=True)
    with pytest.raises(RuntimeError, match="size mismatch"):
        build_stage(spec).load_state_dict({**weights, "fc.bias": torch.zeros(3)}, strict=True)


def test_built_stage_is_in_eval_mode_without_gradients() -> None:
    stage = build_stage(split_model(loaded("resnet18"), 2)[0])
    assert not any(module.training for module in stage.modules())
    assert not any(parameter.requires_grad for parameter in stage.parameters())
    assert not any(tensor.is_meta for tensor in [*stage.parameters(), *stage.buffers()])


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(torch.zeros(1, 3, 8, 8), id="float32"),
        pytest.param(torch.zeros(3, 8, 8, dtype=torch.uint8), id="no batch dimension"),
        pytest.param(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), id="one channel"),
    ],
)
def test_first_stage_rejects_input_that_is_not_a_uint8_rgb_batch(batch: Tensor) -> None:
    model = loaded("resnet18")
    with pytest.raises(ModelError, match=r"expected torch\.uint8"):
        reference_stage(model, split_model(model, 2)[0])(batch)
    with pytest.raises(ModelError, match=r"expected torch\.uint8"):
        Reference(model)(batch)


def test_stage_weights_are_rejected_for_a_stage_of_other_weights() -> None:
    spec = split_model(load_model("resnet18", "random:9", image_size=IMAGE_SIZE), 2)[0]
    with pytest.raises(StageError, match="random:9"):
        stage_weights(loaded("resnet18"), spec)
