"""The operators that a graph may use: functions of tensors without side effects, randomness, file access or uninitialised results."""

import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from multiworld_serving.models.errors import BundleError

_NAME = re.compile(r"aten\.[a-z0-9_]+\.[A-Za-z0-9_]+")

_MAX_INTEGER = 1 << 63
_MAX_EXPONENT = 8


def _bounded(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Arithmetic that never takes more than two numbers of 64 bits: repeated squaring ends with an error."""

    # No functools.wraps: torch.fx writes functions of the module `operator` as Python operators, without these checks.
    def computed(*numbers: Any) -> Any:
        if not all(isinstance(number, int | float) for number in numbers):
            raise TypeError("arithmetic on sizes takes numbers")
        if operation is operator.pow and not 0 <= numbers[1] <= _MAX_EXPONENT:
            raise OverflowError(f"the exponent is {numbers[1]}; expected 0 to {_MAX_EXPONENT}")
        result = operation(*numbers)
        if abs(result) >= _MAX_INTEGER:
            raise OverflowError("an integer has more than 64 bits")
        return result

    return computed


INTEGER_OPERATORS: dict[str, Callable[..., Any]] = {
    name: _bounded(getattr(operator, name))
    for name in (
        *("add", "sub", "mul", "floordiv", "mod", "neg", "pow", "truediv"),
        *("eq", "ne", "le", "lt", "ge", "gt"),
    )
}
"""Arithmetic on sizes."""
INTEGER_OPERATORS["length"] = torch.ops.aten.sym_size.int

_NAMES = """
__and__.Tensor __or__.Tensor __xor__.Tensor _adaptive_avg_pool2d.default _adaptive_avg_pool3d.default _cdist_forward.default
_log_softmax.default _native_batch_norm_legit.no_stats _native_batch_norm_legit_no_training.default _softmax.default
_to_copy.default _unsafe_view.default abs.default acos.default acosh.default adaptive_avg_pool1d.default adaptive_avg_pool2d.default
adaptive_avg_pool3d.default adaptive_max_pool2d.default add.Scalar add.Tensor addcdiv.default addcmul.default addmm.default
alias.default all.default all.dim amax.default amin.default aminmax.default any.default any.dim any.dims arange.default arange.start
arange.start_step argmax.default argmin.default argsort.default asin.default asinh.default atan.default atan2.default atanh.default
avg_pool1d.default avg_pool2d.default avg_pool3d.default baddbmm.default batch_norm.default bitwise_and.Scalar bitwise_and.Tensor
bitwise_not.default bitwise_or.Scalar bitwise_or.Tensor bitwise_xor.Scalar bitwise_xor.Tensor bmm.default bucketize.Tensor
cat.default ceil.default celu.default chunk.default clamp.Tensor clamp.default clamp_max.default clamp_min.default clone.default
col2im.default constant_pad_nd.default contiguous.default conv1d.default conv1d.padding conv2d.default conv2d.padding conv3d.default
conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input convolution.default cos.default cosh.default cumprod.default
cumsum.default detach.default diagonal.default diff.default div.Scalar div.Scalar_mode div.Tensor div.Tensor_mode dot.default
einsum.default elu.default embedding.default eq.Scalar eq.Tensor erf.default erfc.default exp.default expand.default
expand_as.default expm1.default eye.default fill.Scalar fill.Tensor flatten.using_ints flip.default floor.default floor_divide.Scalar
floor_divide.default fmod.Scalar fmod.Tensor frobenius_norm.dim full.default full_like.default gather.default ge.Scalar ge.Tensor
gelu.default ger.default glu.default grid_sampler_2d.default grid_sampler_3d.default group_norm.default gru.input gt.Scalar gt.Tensor
hardsigmoid.default hardswish.default hardtanh.default histc.default im2col.default index.Tensor index_add.default
index_fill.int_Scalar index_put.default index_select.default instance_norm.default isin.Tensor_Tensor isinf.default isnan.default
layer_norm.default le.Scalar le.Tensor leaky_relu.default lerp.Scalar lerp.Tensor lift_fresh_copy.default linalg_vector_norm.default
linear.default linspace.default log.default log10.default log1p.default log2.default log_sigmoid.default log_softmax.int
logaddexp.default logical_and.default logical_not.default logical_or.default logical_xor.default logsumexp.default lstm.input lt.Scalar
lt.Tensor masked_fill.Scalar masked_fill.Tensor matmul.default max.default max.dim max.other max_pool1d.default max_pool2d.default
max_pool2d_with_indices.default max_pool3d_with_indices.default maximum.default mean.default mean.dim meshgrid.indexing min.default
min.dim min.other minimum.default mish.default mm.default movedim.int movedim.intlist mul.Scalar mul.Tensor mv.default
nan_to_num.default native_group_norm.default native_layer_norm.default ne.Scalar ne.Tensor neg.default new_full.default
new_ones.default new_zeros.default norm.ScalarOpt_dim numpy_T.default one_hot.default ones.default ones_like.default outer.default
pad.default permute.default pixel_shuffle.default pixel_unshuffle.default pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor
prelu.default prod.default prod.dim_int reciprocal.default reflection_pad1d.default reflection_pad2d.default
reflection_pad3d.default relu.default relu6.default remainder.Scalar remainder.Tensor repeat.default repeat_interleave.self_int
replication_pad2d.default replication_pad3d.default reshape.default rms_norm.default rnn_relu.input rnn_tanh.input roll.default
rot90.default round.default
rsqrt.default rsub.Scalar rsub.Tensor scalar_tensor.default scaled_dot_product_attention.default scatter.src scatter.value
scatter_add.default scatter_reduce.two select.int select_scatter.default selu.default sgn.default sigmoid.default sign.default
silu.default sin.default sinh.default slice.Tensor slice_scatter.default softmax.int softplus.default sort.default split.Tensor
split.sizes split_with_sizes.default sqrt.default square.default squeeze.default squeeze.dim squeeze.dims stack.default
std.correction std.dim sub.Scalar sub.Tensor sum.default sum.dim_IntList t.default tan.default tanh.default tensor_split.sections
threshold.default tile.default to.dtype topk.default transpose.int tril.default triu.default trunc.default type_as.default
unbind.int unflatten.int unfold.default unsqueeze.default upsample_bicubic2d.vec upsample_bilinear2d.vec upsample_linear1d.vec
upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec upsample_trilinear3d.vec var.correction var.dim
var_mean.correction view.default view.dtype where.Scalar where.ScalarOther where.ScalarSelf where.self zero.default zeros.default
zeros_like.default
"""
OPERATORS = frozenset(f"aten.{name}" for name in _NAMES.split())
"""Names of the allowed operators."""


def find_operator(name: str) -> torch._ops.OpOverload:
    """The operator with this name. Looks up nothing for a name that is not allowed.

    Raises:
        BundleError: the operator is not allowed, or this version of torch lacks it.
    """
    if not _NAME.fullmatch(name) or name not in OPERATORS:
        raise BundleError(f"the operator {name[:80]!r} is not allowed in a bundle")
    _, packet, overload = name.split(".")
    found = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise BundleError(
            f"torch {torch.__version__} lacks the operator {name!r}; install the torch that made the bundle"
        )
    return found
