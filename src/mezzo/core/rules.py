"""The op table: what each op does in mixed precision, as data, the same on every device.

A row says which of five rules an op follows and why. Nothing here knows a framework: ops are named as in ATen,
without the overload (`softmax` stands for `aten::softmax.int`), and any device that autocast knows can be served.
Ops that have no row run as the framework finds them: in the format of their inputs.

The rows start from PyTorch's CUDA lists (ATen/autocast_mode.h, 2.13) so that nothing that is fast there is slow
here, take in its CPU list, and depart from them in three places: what ends a model (`sigmoid`, `softmax`, ...) is
FP32 on every device; the normalisations, `sum` and interpolation keep 16-bit activations in 16 bits wherever the
kernel accumulates in FP32 (`native_accumulation`); ops that only copy values keep the format that they find.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class Rule(str, Enum):
    """What happens to an op's floating inputs and outputs. FP64 and integer tensors are left alone by every rule.

    ========== ======================= ============================ ======================================
    rule       inputs                  arithmetic                   output
    ========== ======================= ============================ ======================================
    lower      to the compute format   the kernel's (FP32 sums)     the compute format
    fp32       to FP32                 FP32                         FP32
    internal_  as they come            FP32                         the format of the first floating input:
    fp32                                                            16 bits in, 16 bits out; FP32 in, FP32 out
    promote    to the widest of them   the widest's                 the widest
    banned     as they come            FP32, or an error            FP32; any 16-bit input is an error
    ========== ======================= ============================ ======================================

    `internal_fp32` never lowers an FP32 input, so a `sum` or `mean` of FP32 losses keeps its 24 bits; to lower the
    input of a normalisation too (an FP32 residual stream saved in 16 bits), give that op the rule `lower`.
    Where no evidence says that the device's 16-bit kernel accumulates in FP32, `internal_fp32` is run as `fp32`.
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
        op: ATen's name without overload, or `namespace::name` for an op of another library.
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
        """The rule and its reason under one compute format."""
        for name, rule, reason in self.by_format:
            if name == compute:
                return rule, reason
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


_FP16_OVERFLOWS = (
    ("fp16", Rule.FP32, "a sum or square of fp16 values passes 65504 easily: the result is FP32"),
)

_ROWS: list[OpRule] = [
    *_family(
        "matrix products",
        Rule.LOWER,
        "products of 16-bit values are exact in FP32 and are summed there; this is what matrix units speed up",
        """addbmm addmm _addmm_activation addmv addr baddbmm bmm chain_matmul einsum linalg_multi_dot linalg_vecdot
        linear matmul mm mv""",
    ),
    *_family(
        "convolutions",
        Rule.LOWER,
        "products of 16-bit values are exact in FP32 and are summed there; this is what matrix units speed up",
        """_convolution convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
        cudnn_convolution cudnn_convolution_transpose _mps_convolution""",
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
        """scaled_dot_product_attention _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
        _scaled_dot_product_cudnn_attention _native_multi_head_attention""",
    ),
    *_family(
        "activations",
        Rule.LOWER,
        "selects or multiplies once: one rounding, and its FP32 slope must not widen the activations",
        "prelu",
    ),
    *_family(
        "activations",
        Rule.INTERNAL_FP32,
        "element by element: evaluated in FP32 and rounded once, so sixteen bits lose half an ulp",
        "gelu silu mish tanh elu selu celu glu",
    ),
    *_family(
        "activations",
        Rule.PROMOTE,
        "selects or scales its input: exact, or one rounding, in whichever format arrives",
        "relu relu6 leaky_relu hardtanh hardsigmoid hardswish threshold rrelu dropout",
    ),
    *_family(
        "normalisations",
        Rule.INTERNAL_FP32,
        "mean and variance cancel and accumulate, so they are FP32 inside; the normalised values fit sixteen bits",
        "layer_norm native_layer_norm rms_norm group_norm native_group_norm batch_norm instance_norm",
    ),
    *_family(
        "ends of a model",
        Rule.FP32,
        "near 1 sixteen bits round to exactly 1 and its logarithm or complement is lost: FP32, computed in FP32",
        """sigmoid log_sigmoid log_sigmoid_forward softmax _softmax log_softmax _log_softmax _safe_softmax
        logsumexp logcumsumexp logaddexp logaddexp2 softplus logit special_expit special_softmax
        special_log_softmax special_logit special_logsumexp""",
    ),
    *_family(
        "losses",
        Rule.FP32,
        "a logarithm or a square, then a sum over the batch: the loss and its first gradient need FP32's range",
        """binary_cross_entropy_with_logits cosine_embedding_loss cosine_similarity cross_entropy_loss ctc_loss
        _ctc_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss
        multilabel_margin_loss multilabel_margin_loss_forward nll_loss nll_loss2d nll_loss_nd poisson_nll_loss
        smooth_l1_loss soft_margin_loss triplet_margin_loss""",
    ),
    *_family(
        "losses",
        Rule.BANNED,
        "a probability that sixteen bits rounded to 0 or 1 has an infinite logarithm and a dead gradient",
        "binary_cross_entropy",
        remedy="Use binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss) on the values before the sigmoid, or "
        "give binary_cross_entropy FP32 probabilities: sigmoid and softmax return FP32 under this table.",
    ),
    *_family(
        "exponentials and powers",
        Rule.FP32,
        "widens the range (or divides by a small number) and magnifies its input's rounding: overflows fp16",
        """acos asin cosh erfinv exp expm1 log log10 log1p log2 pow float_power reciprocal rsqrt sinh tan
        exp2 special_exp2 special_expm1 special_log1p special_erfinv""",
    ),
    *_family(
        "reductions",
        Rule.INTERNAL_FP32,
        "accumulated in FP32 and rounded once at the end",
        "sum nansum",
        by_format=_FP16_OVERFLOWS,
    ),
    *_family(
        "reductions",
        Rule.INTERNAL_FP32,
        "accumulated in FP32 and rounded once; a mean stays within its inputs' range",
        "mean nanmean avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d",
    ),
    *_family(
        "reductions",
        Rule.FP32,
        "rounded at every step of the way, or squared on the way: each step needs FP32's digits and range",
        """cumprod cumsum prod var std var_mean std_mean norm dist pdist cdist renorm frobenius_norm nuclear_norm
        linalg_norm linalg_vector_norm linalg_matrix_norm trace quantile nanquantile avg_pool3d adaptive_avg_pool3d
        cov corrcoef trapezoid cumulative_trapezoid""",
    ),
    *_family(
        "interpolation",
        Rule.INTERNAL_FP32,
        "weights from coordinates are FP32 inside; the pixels are averages of pixels and fit sixteen bits",
        """upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
        upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
        upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa""",
    ),
    *_family(
        "interpolation",
        Rule.FP32,
        "sampling positions: sixteen bits are off by a whole pixel from 256 (bf16) or 2048 (fp16) on",
        "grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback",
    ),
    *_family(
        "copies",
        Rule.PROMOTE,
        "copies or selects values: exact in whichever format arrives",
        """cat stack index_copy index_put max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d
        adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d max_unpool2d max_unpool3d
        reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
        where""",
    ),
    *_family(
        "residual stream",
        Rule.PROMOTE,
        "decides the residual stream: an FP32 table of weights starts it in FP32",
        "embedding embedding_bag",
    ),
    *_family(
        "residual stream",
        Rule.PROMOTE,
        "FP32 plus sixteen bits is FP32: small branches are not lost in a large stream",
        "add sub rsub",
    ),
    *_family(
        "element-wise, several inputs",
        Rule.PROMOTE,
        "inputs may differ in format: the widest of them loses nothing",
        "addcdiv addcmul atan2 mul div lerp maximum minimum",
    ),
    *_family(
        "element-wise, several inputs",
        Rule.PROMOTE,
        "sums of products outside the matrix units: the widest input's format, as PyTorch does",
        "bilinear cross linalg_cross dot vdot inner tensordot scatter_add",
    ),
    *_family(
        "linear algebra",
        Rule.FP32,
        "factorisations cancel at every step, and no library has them in 16 bits",
        """cholesky cholesky_inverse cholesky_solve geqrf inverse linalg_cholesky linalg_cholesky_ex linalg_cond
        linalg_det linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv
        linalg_inv_ex linalg_ldl_factor linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_solve linalg_matrix_exp
        linalg_matrix_power linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet linalg_solve
        linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve logdet lu_solve
        _lu_with_info matrix_exp det slogdet orgqr ormqr pinverse qr svd triangular_solve""",
    ),
    *_family(
        "Fourier and complex",
        Rule.FP32,
        "butterflies add and cancel over many stages; complex numbers have no 16-bit form worth using",
        """fft_fft fft_fft2 fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_ihfft2
        fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn stft istft polar view_as_complex""",
    ),
    *_family(
        "quantisation",
        Rule.FP32,
        "rounds to a grid of its own: a 16-bit rounding before it moves values across grid lines",
        "fake_quantize_per_tensor_affine fake_quantize_per_channel_affine",
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

# (device type, format, op) whose native 16-bit kernel equals FP32 arithmetic rounded once: a test shows each.
NATIVE_FP32_ACCUMULATION: frozenset[tuple[str, str, str]] = frozenset(
    ("cpu", fmt, op)
    for fmt in ("bf16", "fp16")
    for op in ("layer_norm", "native_layer_norm", "sum", "mean", "gelu", "silu", "tanh", "batch_norm")
)


def _version() -> str:
    rows = sorted(
        (row.op, row.rule.value, tuple((f, r.value) for f, r, _ in row.by_format)) for row in RULES.values()
    )
    content = repr((rows, sorted(NATIVE_FP32_ACCUMULATION)))
    return hashlib.sha256(content.encode()).hexdigest()[:12]


# Changes whenever a rule or the evidence changes: compiled code and checkpoints made under another table differ.
TABLE_VERSION: str = _version()


def bare(op: str) -> str:
    """An op's name as the table has it: without `aten::` and without the overload.

    >>> bare("aten::softmax.int"), bare("mylib::fused.out")
    ('softmax', 'mylib::fused')
    """
    return op.removeprefix("aten::").partition(".")[0]
