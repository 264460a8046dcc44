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

_STRINGS = (
    "monday_casesensintive_lower",
    "monday_casesensintive_nochangecase",
    "monday_casesensintive_upper",
    "monday_empty_output",
    "monday_insensintive_upper_twodim",
    "nostopwords_nochangecase",
)
_CASES = {
    "  ImageDecoder of opset 20 (": """
        image_decoder_decode_bmp_rgb image_decoder_decode_jpeg2k_rgb image_decoder_decode_jpeg_bgr
        image_decoder_decode_jpeg_grayscale image_decoder_decode_jpeg_rgb image_decoder_decode_png_rgb
        image_decoder_decode_pnm_rgb image_decoder_decode_tiff_rgb image_decoder_decode_webp_rgb
    """,
    "is no unsigned integer": """
        bitcast_2d_float32_to_int32 bitcast_float32_to_int32 bitcast_float64_to_int64 bitcast_int64_to_float64
        bitcast_scalar_float32_to_int32
    """,
    "other numbers": """
        bernoulli bernoulli_double bernoulli_seed cast_e8m0_FLOAT16_to_FLOAT8E8M0 cast_e8m0_FLOAT_to_FLOAT8E8M0
        training_dropout training_dropout_default training_dropout_default_mask training_dropout_mask
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
COUNTS = (1267, 1333)
"""Right, and all."""
GRADIENTS = 897
"""Cases whose gradients are right; none is wrong, and the others have none, or none that differences could see."""

STORED: dict[str, dict[str, str]] = {
    "pytorch-converted": {},
    "pytorch-operator": {},
    "simple": {f"expand_shape_model{i}": "computed from data" for i in range(1, 5)}
    | {"sequence_model8": "a sequence of the parts of an axis of n elements"}
    | {f"gradient_of_add{and_mul}": "Gradient" for and_mul in ("", "_and_mul")}
    | {f"strnorm_model_{case}": "StringNormalizer" for case in _STRINGS},
}
"""Models with stored outputs that are not right, with a part of the reason."""
STORED_COUNTS = {"pytorch-converted": 82, "pytorch-operator": 35, "simple": 23}
