"""Entries of torch's op_db whose first samples gradc imports whole; one that is imported since is to be added."""

TAKEN = """
special.ndtri masked_scatter _upsample_bilinear2d_aa
nn.functional.max_unpool1d nn.functional.max_unpool2d nn.functional.max_unpool3d i0 special.erfcx
special.i0e special.i1 special.i1e special.log_ndtr
argsort frexp kthvalue median mode msort nanmedian nanquantile quantile sort topk
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
unflatten unsafe_chunk unsafe_split unsqueeze unsqueeze_copy var var.unbiased var_mean var_mean.unbiased vdot view
view_as vsplit vstack where xlogy
"""
