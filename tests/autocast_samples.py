"""One small call for each op of the table, as data: what the dispatch tests run on every device.

A row is ``op: (arguments, keyword arguments)`` as a string, evaluated with these names: `x` (3, 4), `y` (3,
4), `v` (4,), `m` (4, 4) positive definite, `b` (2, 3, 4), `c` (2, 4, 3), `img` (2, 4, 8, 8), `vol` (1, 4, 4,
4, 4), `seq` (2, 4, 8), `s` a scalar tensor, all floating and in (0.1, 0.9), and `t(*shape)` for any other;
`i(*shape)` integers below 3. Values stay inside every function's domain. Names with a dot are further
overloads.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

_UNARY = """acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan exp2 special_exp2
    special_expm1 special_log1p special_erfinv sigmoid log_sigmoid log_sigmoid_forward special_expit logit
    special_logit gelu silu mish tanh elu selu celu glu relu relu6 leaky_relu hardtanh hardsigmoid hardswish
    softplus sum nansum mean nanmean prod var std var_mean std_mean nuclear_norm linalg_norm
    linalg_vector_norm linalg_matrix_norm cov corrcoef pdist linalg_svdvals linalg_svd svd qr linalg_qr
    pinverse linalg_pinv fft_fft fft_fft2 fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn
    fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn linalg_cond
    geqrf special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_erfcx
    special_i1 special_i1e special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_spherical_bessel_j0 linalg_vander"""
_POLYNOMIALS = """chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
    hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p
    shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
    shifted_chebyshev_polynomial_w"""
_SQUARE = """trace cholesky cholesky_inverse inverse linalg_cholesky linalg_cholesky_ex linalg_det linalg_eig
    linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex linalg_ldl_factor linalg_lu
    linalg_ldl_factor_ex linalg_lu_factor linalg_lu_factor_ex linalg_matrix_exp linalg_slogdet logdet
    _lu_with_info matrix_exp det slogdet"""
_BINARY = """logaddexp logaddexp2 add sub rsub atan2 mul div maximum minimum dist cosine_similarity kl_div
l1_loss
    mse_loss huber_loss smooth_l1_loss soft_margin_loss poisson_nll_loss binary_cross_entropy
    binary_cross_entropy_with_logits float_power hinge_embedding_loss complex heaviside heaviside_ isclose"""

_ROWS: dict[str, str] = {
    **{op: "x" for op in _UNARY.split()},
    **{op: "m" for op in _SQUARE.split()},
    **{op: "x, y" for op in _BINARY.split()},
    **{f"special_{op}": "x, i(3, 4)" for op in _POLYNOMIALS.split()},
    "special_zeta": "x + 1, y",
    # matrix products
    "addbmm": "t(3, 3), b, c",
    "addmm": "t(3, 3), x, t(4, 3)",
    "_addmm_activation": "t(3, 3), x, t(4, 3)",
    "addmv": "t(3), x, v",
    "addr": "x, t(3), v",
    "baddbmm": "t(2, 3, 3), b, c",
    "bmm": "b, c",
    "chain_matmul": "[x, m, m]",
    "einsum": "'ij,jk->ik', [x, m]",
    "linalg_multi_dot": "[x, m, m]",
    "linalg_vecdot": "x, y",
    "linear": "x, m, v",
    "matmul": "x, m",
    "mm": "x, m",
    "mv": "x, v",
    "_sparse_mm": "x.to_sparse(), m",
    "_sparse_mm.reduce": "x.to_sparse_csr(), m, 'sum'",
    "_sparse_addmm": "t(3, 4), x.to_sparse(), m",
    "_sparse_softmax": "x.to_sparse(), 1, None",
    "_sparse_log_softmax": "x.to_sparse(), 1, None",
    "hspmm": "x.to_sparse(), m",
    "sspaddmm": "x.to_sparse(), x.to_sparse(), m",
    "sparse_sampled_addmm": "x.to_sparse_csr(), t(3, 2), t(2, 4)",
    # convolutions
    "_convolution": "img, t(4, 4, 3, 3), v, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, False, False, True, True",
    "_convolution.deprecated": "img, t(4, 4, 3, 3), v, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, False, False, True",
    "convolution": "img, t(4, 4, 3, 3), v, [1, 1], [1, 1], [1, 1], False, [0, 0], 1",
    "conv1d": "seq, t(4, 4, 3), v",
    "conv1d.padding": "seq, t(4, 4, 3), v, [1], 'same'",
    "conv2d": "img, t(4, 4, 3, 3), v",
    "conv2d.padding": "img, t(4, 4, 3, 3), v, [1, 1], 'same'",
    "conv3d": "vol, t(4, 4, 3, 3, 3), v",
    "conv3d.padding": "vol, t(4, 4, 3, 3, 3), v, [1, 1, 1], 'same'",
    "conv_tbc": "t(8, 2, 4), t(3, 4, 4), v",
    "conv_transpose1d": "seq, t(4, 4, 3), v",
    "conv_transpose2d": "img, t(4, 4, 3, 3), v",
    "conv_transpose3d": "vol, t(4, 4, 3, 3, 3), v",
    # recurrent layers
    "lstm": "t(5, 2, 4), [t(1, 2, 3), t(1, 2, 3)], [t(12, 4), t(12, 3), t(12), t(12)], "
    "True, 1, 0.0, True, False, False",
    "lstm.data": "t(6, 4), sizes, [t(1, 2, 3), t(1, 2, 3)], "
    "[t(12, 4), t(12, 3), t(12), t(12)], True, 1, 0.0, True, False",
    "gru": "t(5, 2, 4), t(1, 2, 3), [t(9, 4), t(9, 3), t(9), t(9)], True, 1, 0.0, True, False, False",
    "gru.data": "t(6, 4), sizes, t(1, 2, 3), [t(9, 4), t(9, 3), t(9), t(9)], True, 1, 0.0, True, False",
    "rnn_tanh": "t(5, 2, 4), t(1, 2, 3), [t(3, 4), t(3, 3), t(3), t(3)], True, 1, 0.0, True, False, False",
    "rnn_relu": "t(5, 2, 4), t(1, 2, 3), [t(3, 4), t(3, 3), t(3), t(3)], True, 1, 0.0, True, False, False",
    "lstm_cell": "t(2, 4), [t(2, 3), t(2, 3)], t(12, 4), t(12, 3), t(12), t(12)",
    "gru_cell": "t(2, 4), t(2, 3), t(9, 4), t(9, 3), t(9), t(9)",
    "rnn_tanh_cell": "t(2, 4), t(2, 3), t(3, 4), t(3, 3), t(3), t(3)",
    "rnn_relu_cell": "t(2, 4), t(2, 3), t(3, 4), t(3, 3), t(3), t(3)",
    # attention and activations
    "scaled_dot_product_attention": "t(1, 2, 5, 8), t(1, 2, 5, 8), t(1, 2, 5, 8)",
    "prelu": "seq, v",
    "threshold": "x, 0.5, 0.1",
    "dropout": "x, 0.5, True",
    # normalisations
    "layer_norm": "x, [4], v, v",
    "native_layer_norm": "x, [4], v, v, 1e-5",
    "rms_norm": "x, [4], v",
    "group_norm": "img, 2, v, v",
    "native_group_norm": "img, v, v, 2, 4, 64, 2, 1e-5",
    "batch_norm": "img, v, v, f(4), f(4), True, 0.1, 1e-5, True",
    "instance_norm": "img, v, v, None, None, True, 0.1, 1e-5, True",
    # ends of a model, losses
    "softmax": "x, 1",
    "_softmax": "x, 1, False",
    "log_softmax": "x, 1",
    "_log_softmax": "x, 1, False",
    "_safe_softmax": "x, 1",
    "special_softmax": "x, 1",
    "special_log_softmax": "x, 1",
    "logsumexp": "x, [1]",
    "special_logsumexp": "x, [1]",
    "logcumsumexp": "x, 1",
    "cosine_embedding_loss": "x, y, torch.ones(3, device=device)",
    "cross_entropy_loss": "x, i(3)",
    "ctc_loss": "t(5, 2, 4), torch.ones(2, 2, dtype=torch.long, device=device), [5, 5], [2, 2]",
    "_ctc_loss": "t(5, 2, 4), torch.ones(2, 2, dtype=torch.long, device=device), [5, 5], [2, 2]",
    "margin_ranking_loss": "x, y, torch.ones(3, 4, device=device)",
    "multi_margin_loss": "x, i(3)",
    "multilabel_margin_loss": "x, i(3, 4)",
    "multilabel_margin_loss_forward": "x, i(3, 4), 1",
    "nll_loss": "x, i(3)",
    "nll_loss2d": "img, i(2, 8, 8)",
    "nll_loss_nd": "x, i(3)",
    "poisson_nll_loss": "x, y, True, False, 1e-8, 1",
    "triplet_margin_loss": "x, y, t(3, 4)",
    # powers, reductions
    "pow": "x, 2.0",
    "pow.Tensor_Tensor": "x, y",
    "pow.Scalar": "2.0, x",
    "cumprod": "x, 1",
    "cumsum": "x, 1",
    "norm": "x",
    "norm.ScalarOpt_dim": "x, 2, [1]",
    "sum.dim_IntList": "x, [1]",
    "prod.dim_int": "x, 1",
    "frobenius_norm": "x, [0, 1]",
    "cdist": "x, y",
    "renorm": "x, 2, 0, 1.0",
    "quantile": "x, 0.5",
    "nanquantile": "x, 0.5",
    "avg_pool1d": "seq, [2]",
    "avg_pool2d": "img, [2, 2]",
    "avg_pool3d": "vol, [2, 2, 2]",
    "adaptive_avg_pool1d": "seq, [2]",
    "adaptive_avg_pool2d": "img, [2, 2]",
    "adaptive_avg_pool3d": "vol, [2, 2, 2]",
    "histogram.bin_ct": "v, 2",
    "histogram.bins_tensor": "v, f(3).sort()[0]",
    "_histogramdd_bin_edges": "x, [2, 2, 2, 2]",
    "_histogramdd_from_bin_cts": "x, [2, 2, 2, 2]",
    "_histogramdd_from_bin_tensors": "x, [f(2).sort()[0]] * 4",
    "trapezoid": "x, y",
    "cumulative_trapezoid": "x, y",
    # interpolation
    "upsample_nearest1d": "seq, [4]",
    "_upsample_nearest_exact1d": "seq, [4]",
    "upsample_nearest2d": "img, [4, 4]",
    "_upsample_nearest_exact2d": "img, [4, 4]",
    "upsample_nearest3d": "vol, [2, 2, 2]",
    "_upsample_nearest_exact3d": "vol, [2, 2, 2]",
    "upsample_linear1d": "seq, [4], False",
    "upsample_bilinear2d": "img, [4, 4], False",
    "upsample_bilinear2d.vec": "img, [4, 4], False, None",
    "_upsample_bilinear2d_aa": "img, [4, 4], False",
    "upsample_trilinear3d": "vol, [2, 2, 2], False",
    "upsample_bicubic2d": "img, [4, 4], False",
    "_upsample_bicubic2d_aa": "img, [4, 4], False",
    "grid_sampler": "img, t(2, 4, 4, 2), 0, 0, False",
    "grid_sampler_2d": "img, t(2, 4, 4, 2), 0, 0, False",
    "grid_sampler_3d": "vol, t(1, 2, 2, 2, 3), 0, 0, False",
    "_grid_sampler_2d_cpu_fallback": "img, t(2, 4, 4, 2), 0, 0, False",
    # copies
    "cat": "[x, y]",
    "stack": "[x, y]",
    "where": "i(3, 4) > 0, x, y",
    "index_copy": "x, 0, i(1), t(1, 4)",
    "index_put": "x, [i(1)], t(1, 4)",
    "masked_fill.Scalar": "x, i(3, 4) > 0, 0.5",
    "masked_fill_.Scalar": "x, i(3, 4) > 0, 0.5",
    "masked_scatter": "x, i(3, 4) > 0, y",
    "meshgrid.indexing": "[v, t(3)], indexing='ij'",
    "put": "x, i(2), t(2)",
    "scatter.src": "x, 0, i(1, 4), t(1, 4)",
    "scatter.value": "x, 0, i(1, 4), 0.5",
    # in place
    "addbmm_": "t(3, 3), b, c",
    "addmm_": "t(3, 3), x, t(4, 3)",
    "addmv_": "t(3), x, v",
    "addr_": "x, t(3), v",
    "baddbmm_": "t(2, 3, 3), b, c",
    "index_add_": "x, 0, i(1), t(1, 4)",
    "index_copy_": "x, 0, i(1), t(1, 4)",
    "index_put_": "x, [i(1)], t(1, 4)",
    "index_reduce_": "x, 0, i(1), t(1, 4), 'amax'",
    "lerp_": "x, y, 0.5",
    "masked_scatter_": "x, i(3, 4) > 0, y",
    "put_": "x, i(2), t(2)",
    "scatter_.src": "x, 0, i(1, 4), t(1, 4)",
    "scatter_add_": "x, 0, i(1, 4), t(1, 4)",
    "scatter_reduce_.two": "x, 0, i(1, 4), t(1, 4), 'sum'",
    "max_pool1d": "seq, [2]",
    "max_pool2d": "img, [2, 2]",
    "max_pool3d": "vol, [2, 2, 2]",
    "adaptive_max_pool1d": "seq, [2]",
    "adaptive_max_pool2d": "img, [2, 2]",
    "adaptive_max_pool3d": "vol, [2, 2, 2]",
    "fractional_max_pool2d": "img, [2, 2], [2, 2], t(2, 4, 2)",
    "fractional_max_pool3d": "vol, [2, 2, 2], [2, 2, 2], t(1, 4, 3)",
    "max_unpool2d": "img, i(2, 4, 8, 8), [8, 8]",
    "max_unpool3d": "vol, i(1, 4, 4, 4, 4), [4, 4, 4], [1, 1, 1], [0, 0, 0]",
    "reflection_pad1d": "seq, [1, 1]",
    "reflection_pad2d": "img, [1, 1, 1, 1]",
    "reflection_pad3d": "vol, [1, 1, 1, 1, 1, 1]",
    "replication_pad1d": "seq, [1, 1]",
    "replication_pad2d": "img, [1, 1, 1, 1]",
    "replication_pad3d": "vol, [1, 1, 1, 1, 1, 1]",
    # residual stream and element-wise
    "embedding": "x, i(5)",
    "embedding_bag": "x, i(5), i(2).sort()[0] * 0",
    "addcdiv": "x, y, t(3, 4)",
    "addcmul": "x, y, t(3, 4)",
    "lerp": "x, y, 0.5",
    "bilinear": "x, y, t(5, 4, 4), t(5)",
    "cross": "t(4, 3), t(4, 3)",
    "linalg_cross": "t(4, 3), t(4, 3)",
    "dot": "v, t(4)",
    "vdot": "v, t(4)",
    "inner": "x, y",
    "tensordot": "x, y, [1], [1]",
    "scatter_add": "x, 0, i(1, 4), t(1, 4)",
    "scatter_reduce.two": "x, 0, i(1, 4), t(1, 4), 'sum'",
    "index_add": "x, 0, i(1), t(1, 4)",
    "index_reduce": "x, 0, i(1), t(1, 4), 'amax'",
    # linear algebra
    "cholesky_solve": "t(4, 2), m",
    "linalg_householder_product": "t(4, 3), t(3)",
    "orgqr": "t(4, 3), t(3)",
    "ormqr": "t(4, 3), t(3), t(4, 2)",
    "linalg_lstsq": "x, t(3, 2)",
    "linalg_lu_solve": "m, torch.arange(1, 5, dtype=torch.int32, device=device), t(4, 2)",
    "linalg_matrix_power": "m, 2",
    "linalg_matrix_rank": "m, 0.1",
    "linalg_solve": "m, t(4, 2)",
    "linalg_solve_ex": "m, t(4, 2)",
    "linalg_ldl_solve": "m, torch.arange(1, 5, dtype=torch.int32, device=device), t(4, 2)",
    "linalg_solve_triangular": "m, t(4, 2), upper=True",
    "linalg_tensorinv": "t(2, 3, 6), 2",
    "linalg_tensorsolve": "t(2, 3, 6), t(2, 3)",
    "lu_solve": "t(4, 2), m, torch.arange(1, 5, dtype=torch.int32, device=device)",
    "triangular_solve": "t(4, 2), m",
    # Fourier, complex, quantisation
    "stft": "t(16), 8, window=f(8), return_complex=True",
    "istft": "torch.complex(f(5, 5), f(5, 5)), 8",
    "polar": "x, y",
    "view_as_complex": "t(4, 2)",
    "fake_quantize_per_tensor_affine": "x, 0.1, 0, 0, 255",
    "fake_quantize_per_channel_affine": "x, f(4), torch.zeros(4, dtype=torch.int32, device=device), 1, 0, 255",
}

SAMPLES = dict(_ROWS)


def call(
    name: str, dtype: torch.dtype, device: str = "cpu", other: torch.dtype | None = None
) -> Callable[[], Any]:
    """A function of no arguments that calls `torch.ops.aten.<name>` on its sample, floating inputs in
    `dtype`.

    With `other`, the second tensor of each kind (`y`, `v`, every other `t`) has that dtype instead.
    """
    generator = torch.Generator().manual_seed(0)
    made = [0]

    def place(values: torch.Tensor) -> torch.Tensor:
        # A FakeTensor is made where it is to live: a build without CUDA can't move one there.
        return values if device == "cpu" else torch.empty(values.shape, dtype=values.dtype, device=device)

    def t(*shape: int, of: torch.dtype | None = None) -> torch.Tensor:
        made[0] += 1
        values = torch.rand(shape, generator=generator) * 0.8 + 0.1
        return place(values.to(of or (other if other is not None and made[0] % 2 == 0 else dtype)))

    def i(*shape: int) -> torch.Tensor:
        return place(torch.randint(0, 3, shape, generator=generator))

    m = torch.rand(4, 4, generator=generator) * 0.1 + torch.eye(4) * 0.5
    names: dict[str, Any] = {
        "torch": torch,
        "device": device,
        "dtype": dtype,
        "i": i,
        "f": lambda *shape: t(*shape, of=torch.float32),
        "t": t,
        "sizes": torch.tensor([2, 2, 2]),
        "x": t(3, 4),
        "y": t(3, 4),
        "v": t(4, of=other),
        "m": place((m @ m.T).to(dtype)),
        "b": t(2, 3, 4),
        "c": t(2, 4, 3, of=other),
        "img": t(2, 4, 8, 8, of=dtype),
        "vol": t(1, 4, 4, 4, 4, of=dtype),
        "seq": t(2, 4, 8, of=dtype),
    }
    op, _, overload = name.partition(".")
    function = getattr(torch.ops.aten, op)
    if overload:
        function = getattr(function, overload)
    args, kwargs = eval(f"(lambda *a, **k: (a, k))({SAMPLES[name]})", names)
    return lambda: function(*args, **kwargs)


def formats_of(result: Any) -> list[torch.dtype]:
    """The dtypes of the floating tensors in a result, in order."""
    if isinstance(result, torch.Tensor):
        return [result.dtype] if result.is_floating_point() or result.is_complex() else []
    if isinstance(result, (tuple, list)):
        return [dtype for item in result for dtype in formats_of(item)]
    return []


# Random ops are seeded before each call; these can't be asked on a FakeTensor of a build without CUDA, with the
# reason that PyTorch gives there.
NOT_FAKEABLE = {
    "lstm.data": "reads the batch sizes from memory",
    "gru": "looks for cuDNN or a CUDA kernel",
    "gru.data": "reads the batch sizes from memory",
    "gru_cell": "looks for a CUDA kernel",
    "batch_norm": "looks for cuDNN",
    "ctc_loss": "looks for cuDNN",
    "_ctc_loss": "its output's size depends on values",
    "grid_sampler": "looks for cuDNN",
    "grid_sampler_2d": "looks for cuDNN",
    "linalg_lstsq": "its output's size depends on values",
    "istft": "reads the window",
    "geqrf": "looks for a CUDA kernel",
    "cov": "compares values on its way",
    "corrcoef": "compares values on its way",
    "fake_quantize_per_tensor_affine": "looks for CUDA",
    "fake_quantize_per_channel_affine": "looks for CUDA",
    **{name: "looks for CUDA" for name in _ROWS if "sparse" in name or "histogram" in name or "spmm" in name},
    "sspaddmm": "looks for CUDA",
}


# LAPACK's last bits depend on how its work space happens to be aligned: formats only.
LAPACK = {
    *_SQUARE.split(),
    *(
        name
        for name in SAMPLES
        if name.startswith("linalg_") or name.endswith(("solve", "svd", "qr", "geqrf"))
    ),
    *("pinverse", "nuclear_norm", "svd"),
}


def inputs_of(run: Callable[[], Any]) -> list[torch.dtype]:
    """The dtypes of the floating tensors among a call's arguments, in order."""
    args, kwargs = (
        run.__closure__[run.__code__.co_freevars.index(name)].cell_contents for name in ("args", "kwargs")
    )
    return [dtype for dtype in formats_of([*args, *kwargs.values()]) if not dtype.is_complex]


def outcome(name: str, dtype: torch.dtype, device: str, other: torch.dtype | None) -> str:
    """What one call returns, as a string: formats, and on the CPU a hash of the bits; an error's type if it raises."""
    run = call(name, dtype, device, other)
    torch.manual_seed(0)
    try:
        result = run()
    except Exception as error:
        return type(error).__name__
    text = ",".join(str(dtype).removeprefix("torch.") for dtype in formats_of(result))
    if device == "cpu" and name not in LAPACK:
        digest = hashlib.sha256()
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
                bits = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
                digest.update(bits.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        text += " " + digest.hexdigest()[:12]
    return text


def under_torch_autocast() -> dict[str, str]:
    """The outcome of every sample in a plain `torch.autocast` region: CPU in bits, FakeTensors on CUDA in formats."""
    found = {}
    for name in SAMPLES:
        for dtype, other in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found[f"cpu {name} {dtype} {other}"] = outcome(name, dtype, "cpu", other)
            if name not in NOT_FAKEABLE and other is None and dtype is torch.bfloat16:
                with FakeTensorMode(), cuda_autocast(torch.bfloat16):
                    found[f"cuda {name} {dtype} {other}"] = outcome(name, dtype, "cuda", other)
    return found


@contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """What `torch.autocast("cuda", dtype)` does, on a machine without CUDA too, where it would disable itself."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)


def dispatcher_lists() -> dict[str, list[str]]:
    """Every ATen overload that has a kernel at an Autocast key, as the dispatcher tells."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return {
        device: sorted(
            name.removeprefix("aten::")
            for name in names
            if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        )
        for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA"))
    }


if __name__ == "__main__":  # a process in which Mezzo was never imported
    torch.set_num_threads(1)
    print(
        json.dumps(
            {"lists": dispatcher_lists(), "outcomes": under_torch_autocast(), "modules": [*sys.modules]}
        )
    )
