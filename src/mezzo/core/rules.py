"""The op table: what each op does in mixed precision, as data, the same on every device.

A row says which of five rules an op follows, and why. Nothing here knows a framework: ops are named as in
ATen without the overload (`softmax` stands for `aten::softmax.int`), so any device that autocast knows can be
served. An op that has no row runs as the framework finds it, in the format of its inputs.

The rows cover every op on PyTorch 2.13's autocast lists (ATen/autocast_mode.h and .cpp: CUDA, CPU, XPU, MPS)
and keep what those lower, so that nothing that is fast there is slow here. They depart in three places:

- What ends a model (`sigmoid`, `softmax`, ...) gives FP32 computed in FP32. PyTorch leaves `sigmoid` in bf16,
  which rounds probabilities to exactly 1; its CPU list leaves `softmax` there as well.
- Normalisations, `sum` and resizing take 16 bits and give 16 bits, computed in FP32. By whose kernel is data too:
  `NATIVE_FP32_ACCUMULATION`, `OWN_KERNEL`.
- Ops that copy or select values keep the format that they find: they are exact in any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class Rule(str, Enum):
    """What happens to an op's floating inputs and outputs. FP64, complex and integer tensors are left alone.

    ============= ====================== ============================== ====================================
    rule          inputs                 arithmetic                     output
    ============= ====================== ============================== ====================================
    lower         to the compute format  FP32 sums of exact products    the compute format
    fp32          to FP32                FP32                           FP32
    internal_fp32 as they come           FP32                           the format of the first float input
    promote       to the widest of them  that of the widest             the widest
    banned        as they come           FP32; an error for any         FP32
                                         16-bit input
    ============= ====================== ============================== ====================================

    `internal_fp32` is 16 bits in, 16 bits out, and FP32 in, FP32 out: it never lowers, so the `mean` of FP32
    losses keeps its 24 bits. To lower a normalisation's FP32 input too (a residual stream saved in half the
    bytes), give that op the rule `lower`. Where nothing shows that a device's 16-bit kernel accumulates in
    FP32 (`NATIVE_FP32_ACCUMULATION`) and Mezzo has none of its own (`OWN_KERNEL`), the FP32 kernel runs between
    casts and its result is rounded once.
    """

    LOWER = "lower"
    FP32 = "fp32"
    INTERNAL_FP32 = "internal_fp32"
    PROMOTE = "promote"
    BANNED = "banned"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class OpRule:
    """One row of the table.

    Args:
        op: ATen's name without overload.
        rule: the rule in every compute format that `by_format` does not name.
        reason: why, in terms of range, rounding, accumulation or cost.
        family: the heading under which the documentation lists it.
        remedy: for a banned op, what to use in its place.
        by_format: exceptions, as (compute format, rule, reason).
    """

    op: str
    rule: Rule
    reason: str
    family: str
    remedy: str = ""
    by_format: tuple[tuple[str, Rule, str], ...] = ()

    def in_format(self, compute: str) -> tuple[Rule, str]:
        """The rule and its reason under one compute format. Under fp32 nothing is banned."""
        for name, rule, reason in self.by_format:
            if name == compute:
                return rule, reason
        if self.rule is Rule.BANNED and compute == "fp32":
            return Rule.FP32, "nothing is rounded to sixteen bits before it"
        return self.rule, self.reason


def _family(
    family: str,
    rule: Rule,
    reason: str,
    ops: str,
    *,
    remedy: str = "",
    by_format: tuple[tuple[str, Rule, str], ...] = (),
) -> list[OpRule]:
    return [OpRule(op, rule, reason, family, remedy, by_format) for op in ops.split()]


_PRODUCTS = "products of 16-bit values are exact in FP32 and summed there: what matrix units speed up"

_ROWS: list[OpRule] = [
    *_family(
        "matrix products",
        Rule.LOWER,
        _PRODUCTS,
        """addbmm addmm _addmm_activation addmv addr baddbmm bmm chain_matmul einsum linalg_multi_dot
        linalg_vecdot linear matmul mm mv""",
    ),
    *_family(
        "convolutions",
        Rule.LOWER,
        _PRODUCTS,
        """_convolution convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
        conv_transpose3d cudnn_convolution cudnn_convolution_transpose _mps_convolution""",
    ),
    *_family(
        "recurrent layers",
        Rule.LOWER,
        "matrix products between gates that stay inside (-1, 1): sixteen bits hold them",
        """lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell
        _thnn_fused_gru_cell mkldnn_rnn_layer _cudnn_rnn""",
    ),
    *_family(
        "attention",
        Rule.LOWER,
        "two matrix products; the softmax between them stays inside the kernel, in FP32",
        """scaled_dot_product_attention _scaled_dot_product_flash_attention
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _native_multi_head_attention""",
    ),
    *_family(
        "activations",
        Rule.LOWER,
        "one product per element, so one rounding; its FP32 slope must not widen the activations",
        "prelu",
    ),
    *_family(
        "activations",
        Rule.INTERNAL_FP32,
        "exponentials inside are FP32; the result is rounded once, by half an ulp at most",
        "gelu silu mish tanh elu selu celu glu",
    ),
    *_family(
        "activations",
        Rule.PROMOTE,
        "selects or scales its input: exact, or one rounding, in whichever format arrives",
        "relu relu6 leaky_relu hardtanh hardsigmoid hardswish threshold dropout",
    ),
    *_family(
        "normalisations",
        Rule.INTERNAL_FP32,
        "mean and variance cancel and accumulate, so FP32 inside; the normalised values fit sixteen bits",
        "layer_norm native_layer_norm rms_norm group_norm native_group_norm batch_norm instance_norm",
    ),
    *_family(
        "ends of a model",
        Rule.FP32,
        "near 1 sixteen bits round to exactly 1 and the logarithm or complement is lost: computed in FP32",
        "sigmoid logit special_expit special_logit",
    ),
    *_family(
        "ends of a model",
        Rule.FP32,
        "near 1 both formats give exactly 1, and fp16 gives 0 under 3e-8: logarithms of 1 - p and p are lost",
        "softmax _softmax _safe_softmax special_softmax",
    ),
    *_family(
        "ends of a model",
        Rule.FP32,
        "a logarithm of -11 is off by 0.03 in bf16 and 0.004 in fp16; a loss is made of their differences",
        """log_sigmoid log_sigmoid_forward log_softmax _log_softmax logsumexp logcumsumexp logaddexp logaddexp2
        softplus special_log_softmax special_logsumexp""",
    ),
    *_family(
        "losses",
        Rule.FP32,
        "logarithms or squares, summed over the batch: the loss and its first gradient need FP32's range",
        """binary_cross_entropy_with_logits cosine_embedding_loss cosine_similarity cross_entropy_loss
        ctc_loss _ctc_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss
        multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward nll_loss nll_loss2d
        nll_loss_nd poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss""",
    ),
    *_family(
        "losses",
        Rule.BANNED,
        "a probability that sixteen bits rounded to 0 or 1 has an infinite logarithm and a dead gradient",
        "binary_cross_entropy",
        remedy="Use binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss) on what goes into the sigmoid, "
        "or hand it FP32 probabilities: under this table sigmoid and softmax return FP32.",
    ),
    *_family(
        "exponentials and powers",
        Rule.FP32,
        "widens the range or magnifies its input's rounding: fp16 overflows, bf16 keeps no digit",
        """acos asin cosh erfinv exp exp2 expm1 float_power log log10 log1p log2 pow reciprocal rsqrt sinh
        special_erfinv special_exp2 special_expm1 special_log1p tan""",
    ),
    *_family(
        "reductions",
        Rule.INTERNAL_FP32,
        "accumulated in FP32 and rounded once at the end",
        "sum nansum",
        by_format=(
            ("fp16", Rule.FP32, "a sum of fp16 values soon passes 65504: accumulated and returned in FP32"),
        ),
    ),
    *_family(
        "reductions",
        Rule.INTERNAL_FP32,
        "accumulated in FP32 and rounded once; a mean stays within its inputs' range",
        "mean",
    ),
    *_family(
        "reductions",
        Rule.FP32,
        "squares, products or running sums on the way: each step needs FP32's digits and range",
        """cdist corrcoef cov cumprod cumsum cumulative_trapezoid dist frobenius_norm histogram
        _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors linalg_matrix_norm
        linalg_norm linalg_vector_norm nanmean nanquantile norm nuclear_norm pdist prod quantile renorm std
        std_mean trace trapezoid var var_mean""",
    ),
    *_family(
        "pooling and resizing",
        Rule.INTERNAL_FP32,
        "weights from coordinates are FP32 inside; pixels are averages of pixels and fit sixteen bits",
        """upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
        upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa""",
    ),
    *_family(
        "pooling and resizing",
        Rule.FP32,
        "sampling positions: sixteen bits are off by a whole pixel from 256 (bf16) or 2048 (fp16) on",
        "grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback",
    ),
    *_family(
        "pooling and resizing",
        Rule.FP32,
        "the CPU has no 16-bit kernel for averages in three dimensions",
        "avg_pool3d adaptive_avg_pool3d",
    ),
    *_family(
        "pooling and resizing",
        Rule.PROMOTE,
        "means of a few neighbours, rounded once, in whichever format arrives",
        "avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d",
    ),
    *_family(
        "copies",
        Rule.PROMOTE,
        "copies or selects values: exact in whichever format arrives",
        """adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d cat fractional_max_pool2d
        fractional_max_pool3d index_copy index_put masked_scatter max_pool1d max_pool2d max_pool3d max_unpool2d
        max_unpool3d meshgrid put reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
        replication_pad2d replication_pad3d scatter stack where""",
    ),
    *_family(
        "copies",
        Rule.PROMOTE,
        "the destination keeps its format, and what is written into it is rounded to that",
        """addbmm_ addmm_ addmv_ addr_ baddbmm_ heaviside_ index_add_ index_copy_ index_put_ index_reduce_ lerp_
        masked_scatter_ put_ scatter_ scatter_add_ scatter_reduce_""",
    ),
    *_family(
        "copies",
        Rule.PROMOTE,
        "in whichever format arrives; a number that this format lacks, such as -1e9 in fp16, asks for FP32",
        "masked_fill masked_fill_",
    ),
    *_family(
        "residual stream",
        Rule.PROMOTE,
        "copies rows of its weight, whose format the residual stream then starts in",
        "embedding embedding_bag",
    ),
    *_family(
        "residual stream",
        Rule.PROMOTE,
        "FP32 plus sixteen bits is FP32: a small branch is not lost in a large stream",
        "add sub rsub",
    ),
    *_family(
        "element-wise, several inputs",
        Rule.PROMOTE,
        "inputs may differ in format: the widest of them loses nothing",
        "addcdiv addcmul atan2 div heaviside isclose lerp maximum minimum mul",
    ),
    *_family(
        "element-wise, several inputs",
        Rule.PROMOTE,
        "sums of products outside the matrix units: the widest input's format, as on PyTorch's list",
        "bilinear cross dot index_add index_reduce inner linalg_cross scatter_add scatter_reduce tensordot vdot",
    ),
    *_family(
        "matrix products",
        Rule.FP32,
        "gathers by index, which no matrix unit speeds up; few sparse kernels take sixteen bits",
        "_sparse_addmm _sparse_log_softmax _sparse_mm _sparse_softmax hspmm sparse_sampled_addmm sspaddmm",
    ),
    *_family(
        "exponentials and powers",
        Rule.FP32,
        "series and recurrences of many terms, for which there are no 16-bit kernels",
        """special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
        special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
        special_chebyshev_polynomial_w special_erfcx special_hermite_polynomial_h special_hermite_polynomial_he
        special_i1 special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr
        special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
        special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
        special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
        special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
        special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_zeta""",
    ),
    *_family(
        "linear algebra",
        Rule.FP32,
        "factorisations cancel at every step, and no library has them in sixteen bits",
        """cholesky cholesky_inverse cholesky_solve det geqrf inverse linalg_cholesky linalg_cholesky_ex
        linalg_cond linalg_det linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
        linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex
        linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve
        linalg_matrix_exp linalg_matrix_power linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet linalg_solve
        linalg_solve_ex linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve
        linalg_vander logdet lu_solve _lu_with_info matrix_exp orgqr ormqr pinverse qr
        slogdet svd triangular_solve""",
    ),
    *_family(
        "Fourier and complex",
        Rule.FP32,
        "butterflies add and cancel over many stages, and a complex number has no bf16 form at all",
        """complex fft_fft fft_fft2 fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft
        fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn istft polar stft
        view_as_complex""",
    ),
    *_family(
        "quantisation",
        Rule.FP32,
        "rounds to a grid of its own: a 16-bit rounding before it moves values across grid lines",
        "fake_quantize_per_channel_affine fake_quantize_per_tensor_affine",
    ),
]


def _table(rows: Iterable[OpRule]) -> Mapping[str, OpRule]:
    table: dict[str, OpRule] = {}
    for row in rows:
        if row.op in table:
            raise AssertionError(f"op {row.op!r} has two rows")
        table[row.op] = row
    return MappingProxyType(table)


RULES: Mapping[str, OpRule] = _table(_ROWS)


def _grid(device: str, ops: str) -> frozenset[tuple[str, str, str]]:
    return frozenset((device, fmt, op) for fmt in ("bf16", "fp16") for op in ops.split())


# (device type, format, op) whose 16-bit kernel, fed FP32 parameters, gives FP32 arithmetic rounded once, and
# whose gradients don't lose digits as the reduction grows. tests/test_rules.py shows it (torch 2.13). group_norm
# is as right with 16-bit parameters; batch_norm is 20 to 160 ulp off with them, and refuses them beside FP32
# statistics: parameters of normalisations stay FP32 (`mezzo.pytorch.weights.lowering`).
# What was tried on a CPU and isn't here:
#   layer_norm           forward is right, but backward sums the weight's and the bias's gradients in sixteen
#                        bits: in bf16, one thread, 7 % off at 4,096 rows, 24 to 30 % at 65,536
#   rms_norm             right, but with FP32 weights it leaves the fused kernel with a warning
#   instance_norm        right with FP32 weights, wrong in over half of all elements with 16-bit ones
#   softmax              right along the last dimension, along others up to 1.4 ulp off
#   log_softmax          up to 256 ulp (bf16) and 2,000 (fp16) where a probability is near 1
#   upsample_linear1d, _bilinear2d, _trilinear3d, _bicubic2d    interpolate in sixteen bits for some shapes
#   nanmean              divides two rounded numbers; in fp16 its sum overflows
SHOWN_BY_TEST: frozenset[tuple[str, str, str]] = _grid(
    "cpu",
    """batch_norm celu elu gelu glu group_norm mean mish native_group_norm nansum selu silu sum tanh
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
    upsample_nearest3d _upsample_nearest_exact3d""",
)

# Ops that PyTorch's own CUDA table leaves in sixteen bits, and whose CUDA source computes in FP32 (`opmath_t`
# and `acc_type` under ATen/native/cuda: Activation*.cu, Normalization.cuh, ReduceMomentKernel.cu). Running
# them in FP32 instead would double what a CNN saves for backward. Their test waits for a GPU (marked `gpu`).
READ_IN_SOURCE: frozenset[tuple[str, str, str]] = _grid(
    "cuda", "batch_norm celu elu gelu glu mean mish selu silu tanh"
)

# (device type, op) that copies rows of its weight, and sums the gradient of a 16-bit weight in sixteen bits: what
# a row that occurs 256 times has gathered in bf16 no longer changes. They get a backward of their own
# (tests/test_embedding.py). Nothing of the kind was measured on CUDA, whose kernels are left alone.
SUMS_IN_SIXTEEN_BITS: frozenset[tuple[str, str]] = frozenset({("cpu", "embedding"), ("cpu", "embedding_bag")})

# Ops that keep for backward where each maximum lay, as int64: shorter integers hold it
# (`mezzo.pytorch.kernels.short_indices`).
KEEPS_INDICES: frozenset[str] = frozenset({"max_pool1d", "max_pool2d", "max_pool3d"})

NATIVE_FP32_ACCUMULATION: frozenset[tuple[str, str, str]] = SHOWN_BY_TEST | READ_IN_SOURCE

# (device type, format, op) for which Mezzo has a kernel of its own that reads sixteen bits and computes in FP32
# (`mezzo.pytorch.kernels.backend`): forward rounded once, gradients summed in FP32 (tests/test_internal_fp32.py).
OWN_KERNEL: frozenset[tuple[str, str, str]] = _grid(
    "cpu", "cross_entropy_loss instance_norm layer_norm rms_norm softmax"
) | _grid("cuda", "cross_entropy_loss instance_norm")

# Ops that write into their first tensor, whose format therefore stays; the table's only ones.
IN_PLACE: frozenset[str] = frozenset(
    op for op, row in RULES.items() if op.endswith("_") and not op.startswith("_")
)

# Ops that write a number, which may be beyond the range of 16-bit inputs.
WRITES_NUMBER: frozenset[str] = frozenset({"masked_fill", "masked_fill_"})

# Recurrent ops, whole layers and single cells: what they carry from step to step is the policy's `hidden`.
RECURRENT_CELLS: frozenset[str] = frozenset({"lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"})
RECURRENT: frozenset[str] = RECURRENT_CELLS | {"lstm", "gru", "rnn_tanh", "rnn_relu"}

# Of the ops in `OWN_KERNEL`, those that give FP32, as their rule has it: they spare the FP32 copy of what they read.
OWN_GIVES_FP32: frozenset[str] = frozenset({"cross_entropy_loss"})


def native_evidence(device_type: str, fmt: str, op: str) -> str:
    """Why a 16-bit kernel counts as accumulating in FP32, for `explain`; empty where nothing says so."""
    key = (device_type, fmt, op)
    if key in SHOWN_BY_TEST:
        return "a test shows that the 16-bit kernel accumulates in FP32"
    if key in READ_IN_SOURCE:
        return "by its source the 16-bit kernel accumulates in FP32; PyTorch leaves it in sixteen bits too"
    return ""


def own_kernel(device_type: str, fmt: str, op: str) -> str:
    """What Mezzo's own kernel of an op does, for `explain`; empty where there is none."""
    if (device_type, fmt, op) not in OWN_KERNEL:
        return ""
    if op in OWN_GIVES_FP32:
        return "Mezzo's own kernel reads sixteen bits and computes in FP32, without an FP32 copy of its input"
    return "Mezzo's own kernel computes in FP32 between 16-bit input and output"


def _exceptions(row: OpRule) -> list[tuple[str, str]]:
    return [(fmt, rule.value) for fmt, rule, _ in row.by_format]


def _version() -> str:
    rows = sorted((row.op, row.rule.value, _exceptions(row)) for row in RULES.values())
    evidence = (
        sorted(NATIVE_FP32_ACCUMULATION),
        sorted(SUMS_IN_SIXTEEN_BITS),
        sorted(OWN_KERNEL),
        sorted(KEEPS_INDICES),
    )
    return hashlib.sha256(repr((rows, *evidence)).encode()).hexdigest()[:12]


# Changes with any rule or evidence: what was compiled or saved under another table can't pass for this one's.
TABLE_VERSION: str = _version()


def bare(op: str) -> str:
    """An op's name as the table has it: without `aten::` and without the overload.

    >>> bare("aten::softmax.int"), bare("mylib::fused.out")
    ('softmax', 'mylib::fused')
    """
    return op.removeprefix("aten::").partition(".")[0]
