"""What of ONNX's node tests is not right, by the reason that gradc gives; kept by :mod:`test_onnx_nodes`."""

from __future__ import annotations

OPERATORS = tuple(
    """
    Abs Acos Acosh Add AffineGrid And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool
    BatchNormalization Bernoulli BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor BlackmanWindow Cast
    CastLike CausalConvWithState Ceil Celu CenterCropPad Clip Col2Im Compress Concat Constant ConstantOfShape
    Conv ConvInteger ConvTranspose Cos Cosh CumProd CumSum DFT DeformConv DepthToSpace DequantizeLinear Det Div
    Dropout DynamicQuantizeLinear Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather
    GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual GridSample
    GroupNormalization HammingWindow HannWindow HardSigmoid HardSwish Hardmax Identity If ImageDecoder
    InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual LinearAttention Log
    LogSoftmax Loop LpNormalization LpPool MatMul MatMulInteger Max MaxPool MaxUnpool Mean
    MeanVarianceNormalization MelWeightMatrix Min Mish Mod Mul Neg NegativeLogLikelihoodLoss NonMaxSuppression
    NonZero Not OneHot OptionalGetElement OptionalHasElement Or PRelu Pad Pow QLinearConv QLinearMatMul
    QuantizeLinear RMSNormalization RNN Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp
    ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize ReverseSequence
    RoiAlign RotaryEmbedding Round STFT Scan Scatter ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign
    Sin Sinh Size Slice Softmax SoftmaxCrossEntropyLoss Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub
    Sum SwiGLU Swish Tan Tanh TensorScatter TfIdfVectorizer ThresholdedRelu Tile TopK Transpose Trilu Unique
    Unsqueeze Upsample Where Xor
    """.split()
)

CONSTANTS: dict[str, tuple[str, ...]] = {
    "AffineGrid": ("size",),
    "ArrayFeatureExtractor": (),
    "CenterCropPad": ("shape",),
    "Col2Im": ("image_shape", "block_shape"),
    "Compress": ("condition",),
    "ConstantOfShape": ("x",),
    "CumProd": ("axis",),
    "CumSum": ("axis",),
    "DFT": ("dft_length", "axis"),
    "Dropout": ("r", "t"),
    "Expand": ("shape", "new_shape"),
    "MaxUnpool": ("output_shape",),
    "NonZero": ("condition",),
    "OneHot": ("depth",),
    "Pad": ("pads", "value", "axes"),
    "Range": ("start", "limit", "delta"),
    "Reshape": ("shape",),
    "Resize": ("roi", "scales", "sizes"),
    "STFT": ("frame_step", "step", "frame_length", "length"),
    "Slice": ("starts", "ends", "axes", "steps"),
    "Split": ("split",),
    "Squeeze": ("axes",),
    "Tile": ("repeats", "y"),
    "TopK": ("k",),
    "Trilu": ("k",),
    "Unsqueeze": ("axes",),
    "Upsample": ("scales",),
    "Loop": ("trip_count", "cond"),
    "If": ("cond",),
    "MelWeightMatrix": ("num_mel_bins", "dft_length", "sample_rate", "lower_edge_hertz", "upper_edge_hertz"),
    "BlackmanWindow": ("x",),
    "HammingWindow": ("x",),
    "HannWindow": ("x",),
    **{
        f"Reduce{n}": ("axes",)
        for n in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
    },
}
"""Inputs whose values decide shapes, by operator: given as constants."""

_STRINGS = (
    "monday_casesensintive_lower",
    "monday_casesensintive_nochangecase",
    "monday_casesensintive_upper",
    "monday_empty_output",
    "monday_insensintive_upper_twodim",
    "nostopwords_nochangecase",
)
_CASES = {
    "  DeformConv (": """
        basic_deform_conv_with_padding basic_deform_conv_without_padding deform_conv_with_mask_bias
        deform_conv_with_multiple_offset_groups
    """,
    "  Det (": """
        det_2d det_nd
    """,
    "  ImageDecoder (": """
        image_decoder_decode_bmp_rgb image_decoder_decode_jpeg2k_rgb image_decoder_decode_jpeg_bgr
        image_decoder_decode_jpeg_grayscale image_decoder_decode_jpeg_rgb image_decoder_decode_png_rgb
        image_decoder_decode_pnm_rgb image_decoder_decode_tiff_rgb image_decoder_decode_webp_rgb
    """,
    "  NonMaxSuppression (": """
        nonmaxsuppression_center_point_box_format nonmaxsuppression_flipped_coordinates
        nonmaxsuppression_identical_boxes nonmaxsuppression_iou_threshold_boundary
        nonmaxsuppression_limit_output_size nonmaxsuppression_single_box nonmaxsuppression_suppress_by_IOU
        nonmaxsuppression_suppress_by_IOU_and_scores nonmaxsuppression_two_batches nonmaxsuppression_two_classes
    """,
    "  OptionalGetElement (": """
        optional_get_element_tensor
    """,
    "  OptionalHasElement (": """
        optional_has_element_empty_no_input_name_optional_input
        optional_has_element_empty_no_input_name_tensor_input optional_has_element_empty_no_input_optional_input
        optional_has_element_empty_no_input_tensor_input
    """,
    "  RoiAlign (": """
        roialign_aligned_false roialign_aligned_true roialign_mode_max
    """,
    "  TensorScatter (": """
        tensorscatter tensorscatter_3d tensorscatter_circular
    """,
    "  TfIdfVectorizer (": """
        tfidfvectorizer_tf_batch_onlybigrams_skip0 tfidfvectorizer_tf_batch_onlybigrams_skip5
        tfidfvectorizer_tf_batch_uniandbigrams_skip5 tfidfvectorizer_tf_only_bigrams_skip0
        tfidfvectorizer_tf_onlybigrams_levelempty tfidfvectorizer_tf_onlybigrams_skip5
        tfidfvectorizer_tf_uniandbigrams_skip5
    """,
    "Col2Im of other than two axes with equal padding on both sides": """
        col2im_5d
    """,
    "a cast to an 8-bit float that does not saturate": """
        cast_no_saturate_FLOAT16_to_FLOAT8E4M3FN cast_no_saturate_FLOAT16_to_FLOAT8E5M2
        cast_no_saturate_FLOAT_to_FLOAT8E4M3FN cast_no_saturate_FLOAT_to_FLOAT8E5M2
        castlike_no_saturate_FLOAT16_to_FLOAT8E4M3FN castlike_no_saturate_FLOAT16_to_FLOAT8E5M2
        castlike_no_saturate_FLOAT_to_FLOAT8E4M3FN castlike_no_saturate_FLOAT_to_FLOAT8E5M2
    """,
    "a one-sided inverse Fourier transform": """
        dft_irfft dft_irfft_opset19
    """,
    "a scan over batches, of opset 8": """
        scan_sum
    """,
    "dropout in training mode: export the model for evaluation": """
        training_dropout training_dropout_default training_dropout_default_mask training_dropout_mask
    """,
    "gradc's table has no line for it": """
        bernoulli bernoulli_double bernoulli_seed unique_bfloat16_sorted_without_axis unique_length_1
        unique_not_sorted_without_axis unique_sorted_with_axis unique_sorted_with_axis_3d
        unique_sorted_with_negative_axis unique_sorted_without_axis
    """,
    "is no unsigned integer": """
        bitcast_2d_float32_to_int32 bitcast_bool_to_uint8 bitcast_float32_to_int32 bitcast_float64_to_int64
        bitcast_int32_to_float32 bitcast_int64_to_float64 bitcast_int8_to_uint8 bitcast_scalar_float32_to_int32
    """,
    "other numbers": """
        cast_FLOAT16_to_INT2 cast_FLOAT16_to_INT4 cast_FLOAT16_to_UINT2 cast_FLOAT16_to_UINT4 cast_FLOAT_to_INT2
        cast_FLOAT_to_INT4 cast_FLOAT_to_UINT2 cast_FLOAT_to_UINT4 cast_e8m0_FLOAT16_to_FLOAT8E8M0
        cast_e8m0_FLOAT_to_FLOAT8E8M0 castlike_FLOAT16_to_INT2 castlike_FLOAT16_to_INT4
        castlike_FLOAT16_to_UINT2 castlike_FLOAT16_to_UINT4 castlike_FLOAT_to_INT2 castlike_FLOAT_to_INT4
        castlike_FLOAT_to_UINT2 castlike_FLOAT_to_UINT4
    """,
    "the element type FLOAT8E4M3FNUZ": """
        cast_FLOAT16_to_FLOAT8E4M3FNUZ cast_FLOAT8E4M3FNUZ_to_FLOAT cast_FLOAT8E4M3FNUZ_to_FLOAT16
        cast_FLOAT_to_FLOAT8E4M3FNUZ cast_no_saturate_FLOAT16_to_FLOAT8E4M3FNUZ
        cast_no_saturate_FLOAT_to_FLOAT8E4M3FNUZ castlike_FLOAT16_to_FLOAT8E4M3FNUZ
        castlike_FLOAT8E4M3FNUZ_to_FLOAT castlike_FLOAT8E4M3FNUZ_to_FLOAT16 castlike_FLOAT_to_FLOAT8E4M3FNUZ
        castlike_no_saturate_FLOAT16_to_FLOAT8E4M3FNUZ castlike_no_saturate_FLOAT_to_FLOAT8E4M3FNUZ
    """,
    "the element type FLOAT8E5M2FNUZ": """
        cast_FLOAT16_to_FLOAT8E5M2FNUZ cast_FLOAT8E5M2FNUZ_to_FLOAT cast_FLOAT8E5M2FNUZ_to_FLOAT16
        cast_FLOAT_to_FLOAT8E5M2FNUZ cast_no_saturate_FLOAT16_to_FLOAT8E5M2FNUZ
        cast_no_saturate_FLOAT_to_FLOAT8E5M2FNUZ castlike_FLOAT16_to_FLOAT8E5M2FNUZ
        castlike_FLOAT8E5M2FNUZ_to_FLOAT castlike_FLOAT8E5M2FNUZ_to_FLOAT16 castlike_FLOAT_to_FLOAT8E5M2FNUZ
        castlike_no_saturate_FLOAT16_to_FLOAT8E5M2FNUZ castlike_no_saturate_FLOAT_to_FLOAT8E5M2FNUZ
    """,
    "the element type UINT64": """
        add_uint64 bitshift_left_uint64 bitshift_right_uint64 bitwise_and_ui64_bcast_3v1d
        bitwise_or_ui64_bcast_3v1d bitwise_xor_ui64_bcast_3v1d div_uint64 equal_uint64 greater_equal_uint64
        greater_uint64 less_equal_uint64 less_uint64 max_uint64 min_uint64 mod_uint64 mul_uint64
        pow_types_float32_uint64 sub_uint64 top_k_uint64
    """,
}
REFUSED = {case: reason for reason, names in _CASES.items() for case in names.split()}
"""A part of the reason by case."""
COUNTS = (1195, 1333)
"""Right, and all."""

STORED: dict[str, dict[str, str]] = {
    "pytorch-converted": {},
    "pytorch-operator": {},
    "simple": {f"expand_shape_model{i}": "computed from data" for i in range(1, 5)}
    | {f"sequence_model{i}": "equence" for i in range(1, 9)}
    | {f"gradient_of_add{and_mul}": "Gradient" for and_mul in ("", "_and_mul")}
    | {f"strnorm_model_{case}": "StringNormalizer" for case in _STRINGS},
}
"""Models with stored outputs that are not right, with a part of the reason."""
STORED_COUNTS = {"pytorch-converted": 82, "pytorch-operator": 35, "simple": 23}
