"""What the lines of the table of ATen overloads are tried on: samples of torch's op_db, and calls.

:data:`TAKEN` names the entries of op_db whose first samples gradc imports whole; one that is imported since is to be
added.  A line is tried by the entry of its own name, by the one that :data:`REACHED_BY` names, or by the call that
:data:`CALLS` has of its overload.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TAKEN = """
special.ndtri masked_scatter _upsample_bilinear2d_aa
nn.functional.max_unpool1d nn.functional.max_unpool2d nn.functional.max_unpool3d i0 special.erfcx
special.i0e special.i1 special.i1e special.log_ndtr
argsort diagonal_scatter index_reduce.amax index_reduce.amin index_reduce.mean index_reduce.prod unfold_copy
frexp kthvalue median mode msort nanmedian nanquantile quantile sort topk
H T __getitem__ __radd__ __rdiv__ __rmatmul__ __rmod__ __rmul__ __rpow__ __rsub__ _native_batch_norm_legit
_softmax_backward_data _unsafe_masked_index _unsafe_masked_index_put_accumulate abs acos acosh add addbmm addcdiv
addcmul addmm addmm.decomposed addmv addr alias_copy amax amin aminmax asin asinh atan atan2 atanh atleast_1d atleast_2d
atleast_3d baddbmm block_diag bmm broadcast_tensors broadcast_to cartesian_prod cat cdist ceil chunk clamp clamp_max
clamp_min clone column_stack conj conj_physical constant_pad_nd contiguous copysign cos cosh cross cummax cummin cumprod
cumsum cumulative_trapezoid deg2rad diag diag_embed diagflat diagonal diagonal_copy diff dist div.floor_rounding
div.no_rounding_mode div.trunc_rounding dot double dsplit dstack einsum erf erfc erfinv exp exp2 expand expand_as
expand_copy expm1 fft.fftshift fft.ifftshift flatten flip fliplr flipud float_power floor fmax fmin fmod frac gather
gradient grid_sampler_2d grid_sampler_3d hsplit hstack hypot index_add index_select inner kron ldexp lerp lgamma
linalg.cross linalg.diagonal linalg.matrix_norm linalg.multi_dot linalg.norm linalg.norm.subgradients_at_zero
linalg.vecdot linalg.vector_norm log log10 log1p log2 log_softmax log_softmax.with_dtype logaddexp logaddexp2
logcumsumexp logit logsumexp mH mT masked.amax masked.amin masked.cumprod masked.cumsum masked.log_softmax
masked.logaddexp masked.logsumexp masked.mean masked.norm masked.normalize masked.prod masked.softmax masked.softmin
masked.std masked.sum masked.var masked_fill matmul max.binary max.reduction_no_dim max.reduction_with_dim maximum mean
meshgrid.list_of_tensors meshgrid.variadic_tensors min.binary min.reduction_no_dim min.reduction_with_dim minimum mm
movedim mul mv mvlgamma.mvlgamma_p_1 mvlgamma.mvlgamma_p_3 mvlgamma.mvlgamma_p_5 nan_to_num nanmean nansum
native_dropout_backward neg nn.functional.adaptive_avg_pool1d nn.functional.adaptive_avg_pool2d
nn.functional.adaptive_avg_pool3d nn.functional.adaptive_max_pool1d nn.functional.adaptive_max_pool2d
nn.functional.adaptive_max_pool3d nn.functional.alpha_dropout nn.functional.avg_pool1d nn.functional.avg_pool2d
nn.functional.avg_pool3d nn.functional.batch_norm nn.functional.bilinear nn.functional.binary_cross_entropy
nn.functional.binary_cross_entropy_with_logits nn.functional.celu nn.functional.channel_shuffle nn.functional.conv1d
nn.functional.conv2d nn.functional.conv3d nn.functional.conv_transpose1d nn.functional.conv_transpose2d
nn.functional.conv_transpose3d nn.functional.cosine_embedding_loss nn.functional.cosine_similarity
nn.functional.cross_entropy nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d nn.functional.elu
nn.functional.embedding nn.functional.embedding_bag nn.functional.feature_alpha_dropout.without_train nn.functional.gelu
nn.functional.glu nn.functional.grid_sample nn.functional.group_norm nn.functional.hardshrink nn.functional.hardswish
nn.functional.hinge_embedding_loss nn.functional.huber_loss nn.functional.instance_norm nn.functional.interpolate.area
nn.functional.interpolate.bicubic nn.functional.interpolate.bilinear nn.functional.interpolate.linear
nn.functional.interpolate.nearest nn.functional.interpolate.nearest-exact nn.functional.interpolate.trilinear
nn.functional.kl_div nn.functional.l1_loss nn.functional.layer_norm nn.functional.leaky_relu nn.functional.linear
nn.functional.linear_cross_entropy nn.functional.local_response_norm nn.functional.logsigmoid
nn.functional.margin_ranking_loss nn.functional.max_pool1d nn.functional.max_pool2d nn.functional.max_pool3d
nn.functional.max_unpool1d.grad nn.functional.max_unpool2d.grad nn.functional.max_unpool3d.grad nn.functional.mish
nn.functional.mse_loss nn.functional.multi_margin_loss nn.functional.multilabel_soft_margin_loss nn.functional.nll_loss
nn.functional.normalize nn.functional.pad.circular nn.functional.pad.constant nn.functional.pad.reflect
nn.functional.pad.replicate nn.functional.pairwise_distance nn.functional.pixel_shuffle nn.functional.pixel_unshuffle
nn.functional.poisson_nll_loss nn.functional.prelu nn.functional.relu nn.functional.relu6 nn.functional.rms_norm
nn.functional.scaled_dot_product_attention nn.functional.selu nn.functional.silu nn.functional.smooth_l1_loss
nn.functional.soft_margin_loss nn.functional.softmin nn.functional.softmin.with_dtype nn.functional.softplus
nn.functional.softshrink nn.functional.softsign nn.functional.tanhshrink nn.functional.threshold
nn.functional.triplet_margin_loss nn.functional.triplet_margin_with_distance_loss nn.functional.unfold
nn.functional.upsample_bilinear nn.functional.upsample_nearest norm norm.fro norm.inf outer permute positive pow prod
rad2deg ravel real reciprocal remainder renorm repeat repeat_interleave reshape reshape_as resolve_conj resolve_neg roll
rot90 round round.decimals_0 round.decimals_3 round.decimals_neg_3 rsqrt rsub scatter scatter_add scatter_reduce.amax
scatter_reduce.amin scatter_reduce.mean scatter_reduce.prod scatter_reduce.sum select select_scatter sgn sigmoid sign
sin sinc sinh slice slice_scatter softmax softmax.with_dtype special.entr special.ndtr special.xlog1py split
split.list_args split_with_sizes split_with_sizes_copy sqrt square squeeze squeeze.multiple squeeze_copy stack std
std.unbiased std_mean std_mean.unbiased sub sum sum_to_size t t_copy take take_along_dim tan tanh tensordot tile to
torch.ops.aten._safe_softmax.default trace transpose transpose_copy trapezoid trapz tril triu true_divide trunc unbind
unflatten unfold unsafe_chunk unsafe_split unsqueeze unsqueeze_copy var var.unbiased var_mean var_mean.unbiased vdot
view view_as vsplit vstack where xlogy
"""

REACHED_BY = {
    "aten.upsample_bilinear2d.default": "nn.functional.upsample_bilinear",
    "aten.special_entr.default": "special.entr",
    "aten.special_ndtr.default": "special.ndtr",
    "aten.special_ndtri.default": "special.ndtri",
    "aten.special_log_ndtr.default": "special.log_ndtr",
    "aten.special_erfcx.default": "special.erfcx",
    "aten.special_i0e.default": "special.i0e",
    "aten.special_i1.default": "special.i1",
    "aten.special_i1e.default": "special.i1e",
    "aten.bitwise_not.default": "_unsafe_masked_index",
    "aten.logical_not.default": "nanmean",
    "aten.log_sigmoid.default": "nn.functional.logsigmoid",
    "aten.div.Scalar": "trapz",
    "aten.remainder.Scalar": "take_along_dim",
    "aten.pow.Tensor_Scalar": "nn.functional.local_response_norm",
    "aten.special_xlog1py.default": "special.xlog1py",
    "aten.ne.Tensor": "nanmean",
    "aten.gt.Scalar": "renorm",
    "aten.clamp.default": "_unsafe_masked_index",
    "aten.clamp_min.default": "nn.functional.normalize",
    "aten.where.ScalarOther": "renorm",
    "aten._to_copy.default": "to",
    "aten.copy.default": "diff",
    "aten.alias.default": "alias_copy",
    "aten.lift_fresh_copy.default": "masked.std",
    "aten.detach.default": "nanmean",
    "aten._unsafe_view.default": "kron",
    "aten.squeeze.dim": "nn.functional.conv1d",
    "aten.zeros.default": "block_diag",
    "aten.ones.default": "masked.std",
    "aten.zeros_like.default": "diff",
    "aten.new_full.default": "masked.normalize",
    "aten.new_zeros.default": "masked.std",
    "aten.arange.start_step": "mvlgamma.mvlgamma_p_1",
    "aten.index.Tensor": "__getitem__",
    "aten.index_put.default": "_unsafe_masked_index_put_accumulate",
    "aten.linalg_vector_norm.default": "norm",
    "aten.linalg_cross.default": "cross",
    "aten.convolution.default": "nn.functional.conv1d",
    "aten.max_pool2d_with_indices.default": "nn.functional.max_pool1d",
    "aten.max_pool3d_with_indices.default": "nn.functional.max_pool3d",
    "aten.im2col.default": "nn.functional.unfold",
    "aten.index_reduce.default": "index_reduce.amax",
    "aten.upsample_nearest1d.vec": "nn.functional.upsample_nearest",
    "aten.upsample_linear1d.vec": "nn.functional.interpolate.linear",
    "aten.upsample_bilinear2d.vec": "nn.functional.upsample_bilinear",
    "aten.upsample_trilinear3d.vec": "nn.functional.interpolate.trilinear",
    "aten.upsample_bicubic2d.vec": "nn.functional.interpolate.bicubic",
    "aten.grid_sampler.default": "nn.functional.grid_sample",
    "aten._native_batch_norm_legit_functional.default": "_native_batch_norm_legit",
    "aten._native_batch_norm_legit_no_training.default": "nn.functional.batch_norm",
    "aten.cross_entropy_loss.default": "nn.functional.cross_entropy",
    "aten.nll_loss_nd.default": "nn.functional.nll_loss",
}
"""Lines that entries of another name take."""


def real(*shape: int) -> Any:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def positive(*shape: int) -> Any:
    return torch.rand(shape, dtype=torch.float64).add(0.5).requires_grad_()


def whole(*shape: int) -> Any:
    return torch.randint(0, 7, shape)


def _call(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


CALLS: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    **{
        f"aten.{name}.default": lambda: _call(real(2, 3))
        for name in (
            "isnan",
            "isinf",
            "isfinite",
            "isposinf",
            "isneginf",
            "signbit",
            "hardtanh",
            "ones_like",
            "argmax",
            "argmin",
            "any",
            "all",
            "count_nonzero",
            "numpy_T",
            "log_sigmoid_forward",
        )
    },
    **{f"aten.{name}.Tensor": lambda: _call(real(2, 3), real(2, 3)) for name in ("eq", "lt", "le", "gt", "ge")},
    **{
        f"aten.{name}.Scalar": lambda: _call(real(2, 3), 0.3)
        for name in ("eq", "ne", "lt", "le", "ge", "add", "sub", "mul", "fmod")
    },
    **{f"aten.logical_{name}.default": lambda: _call(whole(2, 3), whole(2, 3)) for name in ("and", "or", "xor")},
    **{
        f"aten.bitwise_{name}.Tensor": lambda: _call(whole(2, 3), whole(2, 3))
        for name in ("and", "or", "xor", "left_shift", "right_shift")
    },
    **{f"aten.bitwise_{name}.Scalar": lambda: _call(whole(2, 3), 5) for name in ("and", "or", "xor")},
    **{f"aten.bitwise_{name}.Scalar_Tensor": lambda: _call(5, whole(2, 3)) for name in ("and", "or", "xor")},
    **{f"aten.bitwise_{name}_shift.Tensor_Scalar": lambda: _call(whole(2, 3), 2) for name in ("left", "right")},
    **{f"aten.bitwise_{name}_shift.Scalar_Tensor": lambda: _call(50, whole(2, 3)) for name in ("left", "right")},
    **{f"aten.__{name}shift__.Tensor": lambda: _call(whole(2, 3), whole(2, 3)) for name in "lr"},
    **{f"aten.__{name}shift__.Scalar": lambda: _call(whole(2, 3), 2) for name in "lr"},
    "aten.digamma.default": lambda: _call(positive(2, 3)),
    "aten.polygamma.default": lambda: _call(1, positive(2, 3)),
    "aten.hardsigmoid.default": lambda: _call(real(2, 3)),
    "aten._int_mm.default": lambda: _call(whole(4, 3).to(torch.int8), whole(3, 5).to(torch.int8)),
    "aten.special_erfinv.default": lambda: _call(torch.linspace(-0.9, 0.9, 6, dtype=torch.float64).requires_grad_()),
    "aten._prelu_kernel.default": lambda: _call(real(2, 3), positive(1, 3)),
    "aten.div.Scalar_mode": lambda: _call(real(2, 3), 0.7, rounding_mode="floor"),
    "aten.floor_divide.default": lambda: _call(real(2, 3).detach(), positive(2, 3).detach()),
    "aten.pow.Scalar": lambda: _call(2.0, real(2, 3)),
    "aten.xlogy.Scalar_Other": lambda: _call(real(2, 3), 2.0),
    "aten.xlogy.Scalar_Self": lambda: _call(2.0, positive(2, 3)),
    "aten.special_xlog1py.other_scalar": lambda: _call(real(2, 3), 2.0),
    "aten.special_xlog1py.self_scalar": lambda: _call(2.0, positive(2, 3)),
    "aten.nextafter.default": lambda: _call(real(2, 3).detach(), real(2, 3).detach()),
    "aten.rsub.Scalar": lambda: _call(real(2, 3), 0.7, 2),
    "aten.where.ScalarSelf": lambda: _call(torch.tensor([True, False, True]), 0.7, real(2, 3)),
    "aten.clamp_max.default": lambda: _call(real(2, 3), 0.3),
    "aten.lerp.Tensor": lambda: _call(real(2, 3), real(2, 3), real(2, 3)),
    "aten.narrow.default": lambda: _call(real(2, 3), 1, 1, 2),
    "aten.swapaxes.default": lambda: _call(real(2, 3), 0, 1),
    **{
        f"aten.{name}_pad{n}d.default": lambda n=n: _call(real(2, *(4,) * n), [1, 2] * n)
        for name in ("reflection", "replication")
        for n in (1, 2, 3)
    },
    "aten.full.default": lambda: _call([2, 3], 0.5, dtype=torch.float64),
    "aten.full_like.default": lambda: _call(real(2, 3), 0.5),
    "aten.new_ones.default": lambda: _call(real(2, 3), [2]),
    "aten.fill.Scalar": lambda: _call(real(2, 3), 0.5),
    "aten.fill.Tensor": lambda: _call(real(2, 3), real()),
    "aten.scalar_tensor.default": lambda: _call(0.5, dtype=torch.float64),
    "aten.linspace.default": lambda: _call(0.3, 2.0, 7, dtype=torch.float64),
    "aten.arange.default": lambda: _call(5),
    "aten.arange.start": lambda: _call(1, 5),
    "aten.index_copy.default": lambda: _call(real(4, 3), 0, torch.tensor([2, 0]), real(2, 3)),
    "aten.index_fill.int_Scalar": lambda: _call(real(4, 3), 0, torch.tensor([2, 0]), 0.5),
    "aten.index_fill.int_Tensor": lambda: _call(real(4, 3), 0, torch.tensor([2, 0]), real()),
    "aten.put.default": lambda: _call(real(4, 3), torch.tensor([2, 7]), real(2)),
    "aten.scatter.value": lambda: _call(real(4, 3), 0, torch.tensor([[2, 0, 1]]), 0.5),
    **{  # torch has no derivative of these
        f"aten.scatter.{name}": lambda name=name, reduce=reduce: _call(
            real(4, 3).detach(),
            -1,
            torch.tensor([[2, 0], [1, 1]]),
            real(2, 3).detach() if name == "reduce" else 0.5,
            reduce=reduce,
        )
        for name, reduce in (("reduce", "add"), ("value_reduce", "multiply"))
    },
    "aten.any.dim": lambda: _call(whole(4, 3), 1),
    "aten.all.dim": lambda: _call(whole(4, 3), 1),
    "aten.any.dims": lambda: _call(whole(4, 3), [0, 1]),
    "aten.all.dims": lambda: _call(whole(4, 3), [0, 1]),
    "aten.count_nonzero.dim_IntList": lambda: _call(whole(4, 3), [0]),
    "aten.histc.default": lambda: _call(real(20).detach(), 4, -1.0, 1.0),
    "aten._softmax.default": lambda: _call(real(4, 3), 1, False),
    "aten._log_softmax.default": lambda: _call(real(4, 3), 1, False),
    "aten._cdist_forward.default": lambda: _call(real(4, 3), real(5, 3), 2.0, None),
    "aten.searchsorted.Tensor": lambda: _call(torch.arange(5.0), torch.rand(4) * 5),
    "aten.searchsorted.Scalar": lambda: _call(torch.arange(5.0), 2.5),
    "aten.bucketize.Tensor": lambda: _call(torch.rand(4) * 5, torch.arange(5.0)),
    "aten.bucketize.Scalar": lambda: _call(2.5, torch.arange(5.0)),
    "aten.isin.Tensor_Scalar": lambda: _call(whole(2, 3), 1),
    "aten.isin.Scalar_Tensor": lambda: _call(1, whole(2, 3)),
    "aten.isin.Tensor_Tensor": lambda: _call(whole(2, 3), whole(2)),
    "aten.sort.stable": lambda: _call(real(4, 3), stable=True, dim=1),
    "aten.argsort.stable": lambda: _call(real(4, 3), stable=True, dim=1),
    "aten.quantile.default": lambda: _call(real(7), torch.tensor([0.2, 0.5], dtype=torch.float64)),
    "aten.nanquantile.default": lambda: _call(real(7), torch.tensor([0.2, 0.5], dtype=torch.float64)),
    "aten._adaptive_avg_pool2d.default": lambda: _call(real(1, 2, 5, 5), [2, 3]),
    "aten._adaptive_avg_pool3d.default": lambda: _call(real(1, 2, 4, 5, 5), [2, 3, 2]),
    "aten.col2im.default": lambda: _call(real(1, 8, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
    "aten.upsample_nearest1d.default": lambda: _call(real(1, 2, 4), [6]),
    "aten.upsample_nearest2d.default": lambda: _call(real(1, 2, 4, 3), [6, 5]),
    "aten.upsample_nearest3d.default": lambda: _call(real(1, 2, 4, 3, 2), [6, 5, 3]),
    "aten.upsample_nearest2d.vec": lambda: _call(real(1, 2, 4, 3), [6, 5], None),
    "aten.upsample_nearest3d.vec": lambda: _call(real(1, 2, 4, 3, 2), [6, 5, 3], None),
    "aten.upsample_linear1d.default": lambda: _call(real(1, 2, 4), [6], False),
    "aten.upsample_trilinear3d.default": lambda: _call(real(1, 2, 4, 3, 2), [6, 5, 3], False),
    "aten.upsample_bicubic2d.default": lambda: _call(real(1, 2, 4, 3), [6, 5], False),
    "aten._upsample_bicubic2d_aa.default": lambda: _call(real(1, 2, 6, 5), [4, 3], False),
    "aten.affine_grid_generator.default": lambda: _call(real(2, 2, 3), [2, 1, 4, 3], False),
    "aten.native_layer_norm.default": lambda: _call(real(4, 3), [3], real(3), real(3), 1e-5),
    "aten.native_group_norm.default": lambda: _call(real(2, 4, 3), real(4), real(4), 2, 4, 3, 2, 1e-5),
    "aten._native_batch_norm_legit.no_stats": lambda: _call(real(4, 3), real(3), real(3), True, 0.1, 1e-5),
    "aten._weight_norm.default": lambda: _call(real(4, 3), real(4, 1), 0),
    "aten.nll_loss.default": lambda: _call(real(4, 3), torch.tensor([0, 2, 1, 1])),
    "aten.nll_loss2d.default": lambda: _call(real(2, 3, 2, 2), torch.randint(0, 3, (2, 2, 2))),
    "aten.nll_loss_forward.default": lambda: _call(real(4, 3), torch.tensor([0, 2, 1, 1]), None, 1, -100),
    "aten.nll_loss2d_forward.default": lambda: _call(real(2, 3, 2, 2), torch.randint(0, 3, (2, 2, 2)), None, 1, -100),
    "aten.multilabel_margin_loss.default": lambda: _call(real(2, 3), torch.tensor([[1, -1, 0], [2, 0, -1]])),
    "aten.multilabel_margin_loss_forward.default": lambda: _call(real(2, 3), torch.tensor([[1, -1, 0], [2, 0, -1]]), 1),
    "aten.fake_quantize_per_tensor_affine.default": lambda: _call(real(4, 3), 0.125, 2, 0, 15),
    "aten.fake_quantize_per_channel_affine.default": lambda: _call(
        real(4, 3), torch.tensor([0.125, 0.25, 0.5]), torch.tensor([1, 2, 0], dtype=torch.int32), 1, 0, 15
    ),
}
"""Arguments of overloads that no entry's samples take."""

TOLERANCES = {"aten.digamma.default": 1e-8, "aten.polygamma.default": 1e-8, "aten.hardsigmoid.default": 1e-8}
"""Relative and absolute, where torch's own numbers are off by more than 1e-10: a sixth in f32, short series."""
FIRST_RESULT = {
    "aten.log_sigmoid_forward.default",
    "aten.native_layer_norm.default",
    "aten.native_group_norm.default",
    "aten._native_batch_norm_legit.no_stats",
    "aten.nll_loss_forward.default",
    "aten.nll_loss2d_forward.default",
    "aten.multilabel_margin_loss_forward.default",
}
"""Lines that give the first of their overload's results alone; the others are for torch's own backward."""
DECOMPOSED = {
    "aten.chunk.default",
    "aten.contiguous.default",
    "aten.expand_as.default",
    "aten.flatten.using_ints",
    "aten.frexp.default",
    "aten.movedim.int",
    "aten.movedim.intlist",
    "aten.narrow.default",
    "aten.numpy_T.default",
    "aten.reshape.default",
    "aten.reshape_as.default",
    "aten.swapaxes.default",
    "aten.to.dtype",
    "aten.upsample_bicubic2d.default",
    "aten.upsample_bilinear2d.default",
    "aten.view_as.default",
}
"""Lines that other lines stand for in the graphs of these tests: torch, or the normal form, decomposes their overloads
there, and only Dynamo's graphs have them.
"""
ELSEWHERE = {
    "gradc.stop_gradient.default",  # test_torch_autograd.py: what is detached
    *(f"gradc.{name}.default" for name in ("dropout", "dropout_attention", "random_mask")),  # test_torch_random.py
    *(f"gradc.attention_{name}.default" for name in ("scores", "mix")),  # test_flex_attention.py
    "aten.empty_permuted.default",  # its values are nobody's
    "prims.fma.default",  # test_torch_optimizers
    *(f"bitsandbytes.{name}.default" for name in ("gemm_4bit", "dequantize_4bit", "dequantize_blockwise")),
    *("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"),  # test_grouped_products
    *(f"aten.{name}.input" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")),  # test_recurrent_layers
    *(f"aten.{name}_cell.default" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
    *(f"aten._batch_norm_{name}.default" for name in ("no_update", "with_update_functional")),  # torch_models.py
    *(f"aten._fake_quantize_learnable_per_{name}_affine.default" for name in ("tensor", "channel")),
    *(
        f"quantized_decomposed.{name}"
        for name in (
            "dequantize_per_channel.default",
            "dequantize_per_tensor.default",
            "dequantize_per_tensor.tensor",
            "quantize_per_channel.default",
            "quantize_per_tensor.default",
            "quantize_per_tensor.tensor",
        )
    ),
}
"""Lines that have no case here: other tests of the front-ends try them."""
