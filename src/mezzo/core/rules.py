"""The table of operations: for each op its rule, the reason, and what computes it on each kind of device, in one row.

Ops are named as in ATen without the overload. An op without a row runs in the format of its inputs. The rows cover
every op on PyTorch 2.13's autocast lists and lower what those lower; docs/torch-amp.md lists the differences.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class Rule(str, Enum):
    """What happens to an op's floating inputs and outputs, as docs/policies.md has it in a table.

    `internal_fp32` never lowers: FP32 in, FP32 out. FP64, complex and integer tensors are left alone.
    """

    LOWER = "lower"
    FP32 = "fp32"
    INTERNAL_FP32 = "internal_fp32"
    PROMOTE = "promote"
    BANNED = "banned"

    def __str__(self) -> str:
        return self.value


TESTED = "a test shows that the 16-bit kernel accumulates in FP32"
READ = "by its source the 16-bit kernel accumulates in FP32; PyTorch leaves it in sixteen bits too"


@dataclass(frozen=True)
class Kernel:
    """Mezzo's own kernel of an op: ``module:function`` in `mezzo.pytorch.kernels`, on these devices (empty: all).

    Kinds: ``inside`` (16 bits in and out, FP32 arithmetic; tests/test_internal_fp32.py), ``result`` (the same with an
    FP32 result), ``gradient`` (a gradient summed in FP32), ``indices`` (shorter indices kept for backward), ``number``
    (a number written, which may be beyond a 16-bit range), ``layer`` and ``cell`` (an FP32 state between the steps of a
    recurrent op under ``hidden=fp32``).
    """

    kind: str
    why: str
    path: str
    devices: frozenset[str] = frozenset()


def _inside(path: str, *devices: str) -> Kernel:
    why = "Mezzo's own kernel computes in FP32 between 16-bit input and output"
    return Kernel("inside", why, path, frozenset(devices))


def _state(kind: str) -> Kernel:
    return Kernel(kind, "hidden and cell state stay FP32 between steps", "composed:with_fp32_state")


@dataclass(frozen=True)
class OpRule:
    """One row of the table.

    `rule` holds in every compute format that `by_format` does not name, as (format, rule, reason). `native` is evidence
    that a device's own 16-bit kernels accumulate in FP32, as (device type, evidence). `remedy`: of a banned op.
    """

    op: str
    rule: Rule
    reason: str
    family: str
    remedy: str = ""
    by_format: tuple[tuple[str, Rule, str], ...] = ()
    native: tuple[tuple[str, str], ...] = ()
    kernel: Kernel | None = None

    def evidence(self, device_type: str) -> str:
        """The evidence that the device's 16-bit kernel accumulates in FP32; empty if there is none."""
        return dict(self.native).get(device_type, "")

    def kernel_on(self, device_type: str) -> Kernel | None:
        """Mezzo's kernel on a kind of device, or None."""
        return self.kernel if self.kernel and device_type in (self.kernel.devices or (device_type,)) else None

    def in_format(self, compute: str) -> tuple[Rule, str]:
        """The rule and its reason under one compute format. Under fp32 nothing is banned."""
        for name, rule, reason in self.by_format:
            if name == compute:
                return rule, reason
        if self.rule is Rule.BANNED and compute == "fp32":
            return Rule.FP32, "nothing is rounded to sixteen bits before it"
        return self.rule, self.reason


def _rows(
    rule: Rule,
    reason: str,
    ops: str,
    *,
    remedy: str = "",
    by_format: tuple[tuple[str, Rule, str], ...] = (),
    tested: str = "",
    read: str = "",
    kernels: Mapping[str, Kernel] = MappingProxyType({}),
) -> list[OpRule]:
    """The rows of ops that share a rule and a reason.

    Args:
        ops: the name of their family, a colon, and the ops.
        tested: ops whose 16-bit CPU kernels, with FP32 parameters, give FP32 arithmetic rounded once, and whose
            gradients don't lose digits as the reduction grows (tests/test_rules.py, torch 2.13).
        read: ops whose CUDA source computes in FP32 (`opmath_t` and `acc_type` under ATen/native/cuda), and which
            PyTorch's CUDA table leaves in 16 bits. Their test needs a GPU.
    """
    family, _, names = ops.partition(": ")
    known = {"cpu": (tested.split(), TESTED), "cuda": (read.split(), READ)}
    rows = []
    for op in names.split():
        native = tuple((device, why) for device, (having, why) in known.items() if op in having)
        rows.append(OpRule(op, rule, reason, family, remedy, by_format, native, kernels.get(op)))
    return rows


_PRODUCTS = "products of 16-bit values are exact in FP32 and summed there: what matrix units speed up"

_ROWS: list[OpRule] = [
    *_rows(
        Rule.LOWER,
        _PRODUCTS,
        """matrix products: addbmm addmm _addmm_activation addmv addr baddbmm bmm chain_matmul einsum
        linalg_multi_dot linalg_vecdot linear matmul mm mv""",
    ),
    *_rows(
        Rule.LOWER,
        _PRODUCTS,
        """convolutions: _convolution convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d conv_transpose3d cudnn_convolution cudnn_convolution_transpose _mps_convolution""",
    ),
    *_rows(
        Rule.LOWER,
        "matrix products between gates that stay inside (-1, 1): sixteen bits hold them",
        """recurrent layers: lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
        _thnn_fused_lstm_cell _thnn_fused_gru_cell mkldnn_rnn_layer _cudnn_rnn""",
        kernels={
            **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _state("layer")),
            **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _state("cell")),
        },
    ),
    *_rows(
        Rule.LOWER,
        "two matrix products; the softmax between them stays inside the kernel, in FP32",
        """attention: scaled_dot_product_attention _scaled_dot_product_flash_attention
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _native_multi_head_attention""",
    ),
    *_rows(
        Rule.LOWER,
        "one product per element, so one rounding; its FP32 slope must not widen the activations",
        "activations: prelu",
    ),
    *_rows(
        Rule.INTERNAL_FP32,
        "exponentials inside are FP32; the result is rounded once, by half an ulp at most",
        "activations: gelu silu mish tanh elu selu celu glu",
        tested="gelu silu mish tanh elu selu celu glu",
        read="gelu silu mish tanh elu selu celu glu",
    ),
    *_rows(
        Rule.PROMOTE,
        "selects or scales its input: exact, or one rounding, in whichever format arrives",
        "activations: relu relu6 leaky_relu hardtanh hardsigmoid hardswish threshold dropout",
    ),
    *_rows(Rule.FP32, "the CPU has no fp16 kernel for it", "activations: rrelu"),
    *_rows(
        Rule.INTERNAL_FP32,
        "mean and variance cancel and accumulate, so FP32 inside; the normalized values fit sixteen bits",
        """normalizations: layer_norm native_layer_norm rms_norm group_norm native_group_norm batch_norm
        instance_norm""",
        # With 16-bit parameters batch_norm is 20 to 160 ulp off, so normalizations keep FP32 parameters
        # (`mezzo.pytorch.weights`). On a CPU the others fail: layer_norm's backward sums the gradients of
        # weight and bias in sixteen bits (in bf16 7 % off at 4,096 rows, 24 to 30 % at 65,536), rms_norm leaves the
        # fused kernel with FP32 weights, instance_norm is wrong in half of all elements with 16-bit ones.
        tested="group_norm native_group_norm batch_norm",
        read="batch_norm",
        kernels={
            "layer_norm": _inside("norms:layer_norm", "cpu"),
            "rms_norm": _inside("norms:rms_norm", "cpu"),
            "instance_norm": _inside("composed:instance_norm", "cpu", "cuda"),
        },
    ),
    *_rows(
        Rule.FP32,
        "near 1 sixteen bits round to exactly 1 and the logarithm or complement is lost: computed in FP32",
        "ends of a model: sigmoid logit special_expit special_logit",
    ),
    *_rows(
        Rule.FP32,
        "near 1 both formats give exactly 1, and fp16 gives 0 under 3e-8: logarithms of 1 - p and p are lost",
        "ends of a model: softmax _softmax _safe_softmax special_softmax",
        # The CPU's 16-bit softmax is right along the last dimension, along others up to 1.4 ulp off; its log_softmax
        # is up to 256 ulp (bf16) and 2,000 (fp16) off where a probability is near 1.
        kernels={"softmax": _inside("composed:softmax", "cpu")},
    ),
    *_rows(
        Rule.FP32,
        "a logarithm of -11 is off by 0.03 in bf16 and 0.004 in fp16; a loss is made of their differences",
        """ends of a model: log_sigmoid log_sigmoid_forward log_softmax _log_softmax logsumexp logcumsumexp
        logaddexp logaddexp2 softplus special_log_softmax special_logsumexp""",
    ),
    *_rows(
        Rule.FP32,
        "logarithms or squares, summed over the batch: the loss and its first gradient need FP32's range",
        """losses: binary_cross_entropy_with_logits cosine_embedding_loss cosine_similarity cross_entropy_loss
        ctc_loss _ctc_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss
        multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward nll_loss nll_loss2d
        nll_loss_nd poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss""",
        kernels={
            "cross_entropy_loss": Kernel(
                "result",
                "Mezzo's own kernel reads sixteen bits and computes in FP32, without an FP32 copy of its input",
                "cross_entropy:cross_entropy_loss",
                frozenset({"cpu", "cuda"}),
            )
        },
    ),
    *_rows(
        Rule.BANNED,
        "a probability that sixteen bits rounded to 0 or 1 has an infinite logarithm and a dead gradient",
        "losses: binary_cross_entropy",
        remedy="Use binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss) on the input of the sigmoid, or give it "
        "FP32 probabilities: under this table sigmoid and softmax return FP32.",
    ),
    *_rows(
        Rule.FP32,
        "widens the range or magnifies its input's rounding: fp16 overflows, bf16 keeps no digit",
        """exponentials and powers: acos asin cosh erfinv exp exp2 expm1 float_power log log10 log1p log2 pow
        reciprocal rsqrt sinh special_erfinv special_exp2 special_expm1 special_log1p tan""",
    ),
    *_rows(
        Rule.INTERNAL_FP32,
        "accumulated in FP32 and rounded once at the end",
        "reductions: sum nansum",
        tested="sum nansum",
        by_format=(
            ("fp16", Rule.FP32, "a sum of fp16 values soon passes 65504: accumulated and returned in FP32"),
        ),
    ),
    *_rows(
        Rule.INTERNAL_FP32,
        "accumulated in FP32 and rounded once; a mean stays within its inputs' range",
        "reductions: mean",
        tested="mean",  # not nanmean, which divides two rounded numbers; in fp16 its sum overflows
        read="mean",
    ),
    *_rows(
        Rule.FP32,
        "squares, products or running sums on the way: each step needs FP32's digits and range",
        """reductions: cdist corrcoef cov cumprod cumsum cumulative_trapezoid dist frobenius_norm histogram
        _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors linalg_matrix_norm
        linalg_norm linalg_vector_norm nanmean nanquantile norm nuclear_norm pdist prod quantile renorm std
        std_mean trace trapezoid var var_mean""",
    ),
    *_rows(
        Rule.INTERNAL_FP32,
        "weights from coordinates are FP32 inside; pixels are averages of pixels and fit sixteen bits",
        """pooling and resizing: upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
        _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
        upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
        _upsample_bicubic2d_aa""",
        # Linear and cubic ones interpolate in sixteen bits for some shapes.
        tested="""upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
        upsample_nearest3d _upsample_nearest_exact3d""",
    ),
    *_rows(
        Rule.FP32,
        "sampling positions: sixteen bits are off by a whole pixel from 256 (bf16) or 2048 (fp16) on",
        "pooling and resizing: grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback",
    ),
    *_rows(
        Rule.FP32,
        "the CPU has no 16-bit kernel for averages in three dimensions",
        "pooling and resizing: avg_pool3d adaptive_avg_pool3d",
    ),
    *_rows(
        Rule.PROMOTE,
        "means of a few neighbours, rounded once, in whichever format arrives",
        "pooling and resizing: avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d",
    ),
    *_rows(
        Rule.PROMOTE,
        "copies or selects values: exact in whichever format arrives",
        """copies: adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d cat fractional_max_pool2d
        fractional_max_pool3d index_copy index_put masked_scatter max_pool1d max_pool2d max_pool3d
        max_unpool2d max_unpool3d meshgrid put reflection_pad1d reflection_pad2d reflection_pad3d
        replication_pad1d replication_pad2d replication_pad3d scatter stack where""",
        kernels=dict.fromkeys(
            ("max_pool1d", "max_pool2d", "max_pool3d"),
            Kernel(
                "indices",
                "backward keeps its indices in 16 or 32 bits, not 64",
                "composed:keeping_short_indices",
            ),
        ),
    ),
    *_rows(
        Rule.PROMOTE,
        "the destination keeps its format, and what is written into it is rounded to that",
        """copies: addbmm_ addmm_ addmv_ addr_ baddbmm_ heaviside_ index_add_ index_copy_ index_put_
        index_reduce_ lerp_ masked_scatter_ put_ scatter_ scatter_add_ scatter_reduce_""",
    ),
    *_rows(
        Rule.PROMOTE,
        "in the input's format, or in FP32 if that format can't hold the number to fill in (-1e9 in fp16)",
        "copies: masked_fill masked_fill_",
        kernels=dict.fromkeys(("masked_fill", "masked_fill_"), Kernel("number", "", "")),
    ),
    *_rows(
        Rule.PROMOTE,
        "copies rows of its weight, whose format the residual stream then starts in",
        "residual stream: embedding embedding_bag",
        # The CPU's kernel sums the gradient of a 16-bit weight in sixteen bits: what a row that occurs 256 times has
        # gathered in bf16 no longer changes (tests/test_embedding.py). Nothing of the kind was measured on CUDA.
        kernels={
            op: Kernel(
                "gradient",
                "the gradient of a 16-bit weight is summed in FP32",
                f"embedding:{op}",
                frozenset({"cpu"}),
            )
            for op in ("embedding", "embedding_bag")
        },
    ),
    *_rows(
        Rule.PROMOTE,
        "FP32 plus sixteen bits is FP32: a small branch is not lost in a large stream",
        "residual stream: add sub rsub",
    ),
    *_rows(
        Rule.PROMOTE,
        "inputs may differ in format: the widest of them loses nothing",
        "element-wise, several inputs: addcdiv addcmul atan2 div heaviside isclose lerp maximum minimum mul",
    ),
    *_rows(
        Rule.PROMOTE,
        "sums of products outside the matrix units: the widest input's format, as on PyTorch's list",
        """element-wise, several inputs: bilinear cross dot index_add index_reduce inner linalg_cross
        scatter_add scatter_reduce tensordot vdot""",
    ),
    *_rows(
        Rule.FP32,
        "gathers by index, which no matrix unit speeds up; few sparse kernels take sixteen bits",
        """matrix products: _sparse_addmm _sparse_log_softmax _sparse_mm _sparse_softmax hspmm
        sparse_sampled_addmm sspaddmm""",
    ),
    *_rows(
        Rule.FP32,
        "series and recurrences of many terms, for which there are no 16-bit kernels",
        """exponentials and powers: special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0
        special_bessel_y1 special_chebyshev_polynomial_t special_chebyshev_polynomial_u
        special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_erfcx
        special_hermite_polynomial_h special_hermite_polynomial_he special_i1 special_i1e
        special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr
        special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
        special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
        special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
        special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
        special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_zeta""",
    ),
    *_rows(
        Rule.FP32,
        "factorisations cancel at every step, and no library has them in sixteen bits",
        """linear algebra: cholesky cholesky_inverse cholesky_solve det geqrf inverse linalg_cholesky
        linalg_cholesky_ex linalg_cond linalg_det linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
        linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex
        linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve
        linalg_matrix_exp linalg_matrix_power linalg_matrix_rank linalg_matrix_sqrth linalg_pinv linalg_qr
        linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular linalg_svd linalg_svdvals
        linalg_tensorinv linalg_tensorsolve linalg_vander logdet lu_solve _lu_with_info matrix_exp orgqr ormqr
        pinverse qr slogdet svd triangular_solve""",
    ),
    *_rows(
        Rule.FP32,
        "butterflies add and cancel over many stages, and a complex number has no bf16 form at all",
        """Fourier and complex: complex fft_fft fft_fft2 fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft
        fft_ifft2 fft_ifftn fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2
        fft_rfftn istft polar stft view_as_complex""",
    ),
    *_rows(
        Rule.FP32,
        "rounds to its own grid: a 16-bit rounding before it moves values across grid lines",
        """quantization: fake_quantize_per_channel_affine fake_quantize_per_tensor_affine
        _fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_tensor_affine""",
    ),
]


RULES: Mapping[str, OpRule] = MappingProxyType({row.op: row for row in _ROWS})
assert len(RULES) == len(_ROWS), "an op has two rows"


# Ops that write into their first tensor, whose format therefore stays; the table's only ones.
IN_PLACE: frozenset[str] = frozenset(op for op in RULES if op.endswith("_") and not op.startswith("_"))


def _version() -> str:
    rows = []
    for row in RULES.values():
        kernel = row.kernel and (row.kernel.kind, row.kernel.path, sorted(row.kernel.devices))
        exceptions = [(fmt, rule.value) for fmt, rule, _ in row.by_format]
        rows.append((row.op, row.rule.value, exceptions, row.native, kernel))
    return hashlib.sha256(repr(sorted(rows, key=lambda row: row[0])).encode()).hexdigest()[:12]


# Changes with any rule or evidence: what was compiled or saved under another table can't pass for this one's.
TABLE_VERSION: str = _version()


def bare(op: str) -> str:
    """An op's name as the table has it: without `aten::` and without the overload."""
    return op.removeprefix("aten::").partition(".")[0]
