"""One small call for each op of the table, as data: what the dispatch tests run on every device.

A row is ``arguments: overloads``. The arguments are a string, evaluated with these names: `x` (3, 4), `y` (3,
4), `v` (4,), `m` (4, 4) positive definite, `b` (2, 3, 4), `c` (2, 4, 3), `img` (2, 4, 8, 8), `vol` (1, 4, 4,
4, 4), `seq` (2, 4, 8), `s` a scalar tensor, all floating and in (0.1, 0.9), and `t(*shape)` for any other;
`i(*shape)` integers below 3. Values stay inside every function's domain. Names with a dot are further
overloads.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

# Arguments -> the overloads that are called with them.
_GROUPS = {
    "x": """
        acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan exp2 special_exp2
        special_expm1 special_log1p special_erfinv sigmoid log_sigmoid log_sigmoid_forward special_expit
        logit special_logit gelu silu mish tanh elu selu celu glu relu relu6 leaky_relu hardtanh hardsigmoid
        hardswish softplus sum nansum mean nanmean prod var std var_mean std_mean nuclear_norm linalg_norm
        linalg_vector_norm linalg_matrix_norm cov corrcoef pdist linalg_svdvals linalg_svd svd qr linalg_qr
        pinverse linalg_pinv fft_fft fft_fft2 fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2
        fft_ifftn fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2
        fft_rfftn linalg_cond geqrf special_bessel_j0 special_log_ndtr linalg_vander norm rrelu""",
    "m": """
        trace cholesky cholesky_inverse inverse linalg_cholesky linalg_cholesky_ex linalg_det linalg_eig
        linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex linalg_ldl_factor linalg_lu
        linalg_ldl_factor_ex linalg_lu_factor linalg_lu_factor_ex linalg_matrix_exp linalg_slogdet logdet
        _lu_with_info matrix_exp det slogdet""",
    "x, y": """
        logaddexp logaddexp2 add sub rsub atan2 mul div maximum minimum dist cosine_similarity kl_div
        l1_loss mse_loss huber_loss smooth_l1_loss soft_margin_loss binary_cross_entropy
        binary_cross_entropy_with_logits float_power hinge_embedding_loss complex heaviside heaviside_
        isclose linalg_vecdot pow.Tensor_Tensor cdist trapezoid cumulative_trapezoid inner polar""",
    "x, y, True, False, 1e-8, 1": "poisson_nll_loss",
    "x, i(3, 4)": "special_chebyshev_polynomial_t multilabel_margin_loss",
    "t(3, 3), b, c": "addbmm addbmm_",
    "t(3, 3), x, t(4, 3)": "addmm _addmm_activation addmm_",
    "t(3), x, v": "addmv addmv_",
    "x, t(3), v": "addr addr_",
    "t(2, 3, 3), b, c": "baddbmm baddbmm_",
    "b, c": "bmm",
    "[x, m, m]": "chain_matmul linalg_multi_dot",
    "'ij,jk->ik', [x, m]": "einsum",
    "x, m, v": "linear",
    "x, m": "matmul mm",
    "x, v": "mv",
    "x.to_sparse(), m": "_sparse_mm hspmm",
    "x.to_sparse_csr(), m, 'sum'": "_sparse_mm.reduce",
    "t(3, 4), x.to_sparse(), m": "_sparse_addmm",
    "x.to_sparse(), 1, None": "_sparse_softmax _sparse_log_softmax",
    "img, t(4, 4, 3, 3), v, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, False, False, True, True": """
        _convolution""",
    "img, t(4, 4, 3, 3), v, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, False, False, True": """
        _convolution.deprecated""",
    "img, t(4, 4, 3, 3), v, [1, 1], [1, 1], [1, 1], False, [0, 0], 1": "convolution",
    "seq, t(4, 4, 3), v": "conv1d conv_transpose1d",
    "seq, t(4, 4, 3), v, [1], 'same'": "conv1d.padding",
    "img, t(4, 4, 3, 3), v": "conv2d conv_transpose2d",
    "img, t(4, 4, 3, 3), v, [1, 1], 'same'": "conv2d.padding",
    "vol, t(4, 4, 3, 3, 3), v": "conv3d conv_transpose3d",
    "vol, t(4, 4, 3, 3, 3), v, [1, 1, 1], 'same'": "conv3d.padding",
    "t(8, 2, 4), t(3, 4, 4), v": "conv_tbc",
    "t(5, 2, 4), [t(1, 2, 3), t(1, 2, 3)], [t(12, 4), t(12, 3), t(12), t(12)], True, 1, 0.0, True, False, False": """
        lstm""",
    "t(6, 4), sizes, [t(1, 2, 3), t(1, 2, 3)], [t(12, 4), t(12, 3), t(12), t(12)], True, 1, 0.0, True, False": """
        lstm.data""",
    "t(5, 2, 4), t(1, 2, 3), [t(9, 4), t(9, 3), t(9), t(9)], True, 1, 0.0, True, False, False": "gru",
    "t(6, 4), sizes, t(1, 2, 3), [t(9, 4), t(9, 3), t(9), t(9)], True, 1, 0.0, True, False": "gru.data",
    "t(5, 2, 4), t(1, 2, 3), [t(3, 4), t(3, 3), t(3), t(3)], True, 1, 0.0, True, False, False": "rnn_tanh rnn_relu",
    "t(2, 4), [t(2, 3), t(2, 3)], t(12, 4), t(12, 3), t(12), t(12)": "lstm_cell",
    "t(2, 4), t(2, 3), t(9, 4), t(9, 3), t(9), t(9)": "gru_cell",
    "t(2, 4), t(2, 3), t(3, 4), t(3, 3), t(3), t(3)": "rnn_tanh_cell rnn_relu_cell",
    "t(1, 2, 5, 8), t(1, 2, 5, 8), t(1, 2, 5, 8)": "scaled_dot_product_attention",
    "seq, v": "prelu",
    "x, 0.5, 0.1": "threshold",
    "x, 0.5, True": "dropout",
    "x, [4], v, v": "layer_norm",
    "x, [4], v, v, 1e-5": "native_layer_norm",
    "x, [4], v": "rms_norm",
    "img, 2, v, v": "group_norm",
    "img, v, v, 2, 4, 64, 2, 1e-5": "native_group_norm",
    "img, v, v, f(4), f(4), True, 0.1, 1e-5, True": "batch_norm",
    "img, v, v, None, None, True, 0.1, 1e-5, True": "instance_norm",
    "x, 1": """
        softmax log_softmax _safe_softmax special_softmax special_log_softmax logcumsumexp cumprod cumsum
        prod.dim_int""",
    "x, 1, False": "_softmax _log_softmax",
    "x, [1]": "logsumexp special_logsumexp sum.dim_IntList",
    "x, y, torch.ones(3, device=device)": "cosine_embedding_loss",
    "x, i(3)": "cross_entropy_loss multi_margin_loss nll_loss nll_loss_nd",
    "t(5, 2, 4), torch.ones(2, 2, dtype=torch.long, device=device), [5, 5], [2, 2]": "ctc_loss _ctc_loss",
    "x, y, torch.ones(3, 4, device=device)": "margin_ranking_loss",
    "x, i(3, 4), 1": "multilabel_margin_loss_forward",
    "img, i(2, 8, 8)": "nll_loss2d",
    "x, y, t(3, 4)": "triplet_margin_loss addcdiv addcmul",
    "x, 2.0": "pow",
    "2.0, x": "pow.Scalar",
    "x, 2, [1]": "norm.ScalarOpt_dim",
    "x, [0, 1]": "frobenius_norm",
    "x, 2, 0, 1.0": "renorm",
    "x, 0.5": "quantile nanquantile",
    "seq, [2]": "avg_pool1d adaptive_avg_pool1d max_pool1d adaptive_max_pool1d",
    "img, [2, 2]": "avg_pool2d adaptive_avg_pool2d max_pool2d adaptive_max_pool2d",
    "vol, [2, 2, 2]": """
        avg_pool3d adaptive_avg_pool3d upsample_nearest3d _upsample_nearest_exact3d max_pool3d
        adaptive_max_pool3d""",
    "seq, [4]": "upsample_nearest1d _upsample_nearest_exact1d",
    "img, [4, 4]": "upsample_nearest2d _upsample_nearest_exact2d",
    "seq, [4], False": "upsample_linear1d",
    "img, [4, 4], False": """
        upsample_bilinear2d _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa""",
    "img, [4, 4], False, None": "upsample_bilinear2d.vec",
    "vol, [2, 2, 2], False": "upsample_trilinear3d",
    "img, t(2, 4, 4, 2), 0, 0, False": "grid_sampler grid_sampler_2d _grid_sampler_2d_cpu_fallback",
    "vol, t(1, 2, 2, 2, 3), 0, 0, False": "grid_sampler_3d",
    "[x, y]": "cat stack",
    "i(3, 4) > 0, x, y": "where",
    "x, 0, i(1), t(1, 4)": "index_copy index_add_ index_copy_ index_add",
    "x, [i(1)], t(1, 4)": "index_put index_put_",
    "x, i(3, 4) > 0, 0.5": "masked_fill.Scalar masked_fill_.Scalar",
    "x, i(3, 4) > 0, y": "masked_scatter masked_scatter_",
    "[v, t(3)], indexing='ij'": "meshgrid.indexing",
    "x, i(2), t(2)": "put put_",
    "x, 0, i(1, 4), t(1, 4)": "scatter.src scatter_.src scatter_add_ scatter_add",
    "x, 0, i(1, 4), 0.5": "scatter.value",
    "x, 0, i(1), t(1, 4), 'amax'": "index_reduce_ index_reduce",
    "x, y, 0.5": "lerp_ lerp",
    "x, 0, i(1, 4), t(1, 4), 'sum'": "scatter_reduce_.two scatter_reduce.two",
    "img, [2, 2], [2, 2], t(2, 4, 2)": "fractional_max_pool2d",
    "vol, [2, 2, 2], [2, 2, 2], t(1, 4, 3)": "fractional_max_pool3d",
    "img, i(2, 4, 8, 8), [8, 8]": "max_unpool2d",
    "vol, i(1, 4, 4, 4, 4), [4, 4, 4], [1, 1, 1], [0, 0, 0]": "max_unpool3d",
    "seq, [1, 1]": "reflection_pad1d replication_pad1d",
    "img, [1, 1, 1, 1]": "reflection_pad2d replication_pad2d",
    "vol, [1, 1, 1, 1, 1, 1]": "reflection_pad3d replication_pad3d",
    "x, i(5)": "embedding",
    "x, i(5), i(2).sort()[0] * 0": "embedding_bag",
    "x, y, t(5, 4, 4), t(5)": "bilinear",
    "t(4, 3), t(4, 3)": "cross linalg_cross",
    "v, t(4)": "dot vdot",
    "x, y, [1], [1]": "tensordot",
    "t(4, 2), m": "cholesky_solve triangular_solve",
    "t(4, 3), t(3)": "linalg_householder_product orgqr",
    "t(4, 3), t(3), t(4, 2)": "ormqr",
    "x, t(3, 2)": "linalg_lstsq",
    "m, torch.arange(1, 5, dtype=torch.int32, device=device), t(4, 2)": "linalg_lu_solve linalg_ldl_solve",
    "m, 2": "linalg_matrix_power",
    "m, 0.1": "linalg_matrix_rank",
    "m, t(4, 2)": "linalg_solve linalg_solve_ex",
    "m, t(4, 2), upper=True": "linalg_solve_triangular",
    "t(2, 3, 6), 2": "linalg_tensorinv",
    "t(2, 3, 6), t(2, 3)": "linalg_tensorsolve",
    "t(4, 2), m, torch.arange(1, 5, dtype=torch.int32, device=device)": "lu_solve",
    "t(16), 8, window=f(8), return_complex=True": "stft",
    "torch.complex(f(5, 5), f(5, 5)), 8": "istft",
    "t(4, 2)": "view_as_complex",
    "x, 0.1, 0, 0, 255": "fake_quantize_per_tensor_affine",
    "x, f(1), f(1), 0, 255": "_fake_quantize_learnable_per_tensor_affine",
    "x, f(4), f(4), 1, 0, 255": "_fake_quantize_learnable_per_channel_affine",
    "x, f(4), torch.zeros(4, dtype=torch.int32, device=device), 1, 0, 255": """
        fake_quantize_per_channel_affine""",
}

SAMPLES = {op: arguments for arguments, ops in _GROUPS.items() for op in ops.split()}


_SHAPES = {
    "x": (3, 4), "y": (3, 4), "v": (4,), "b": (2, 3, 4), "c": (2, 4, 3),
    "img": (2, 4, 8, 8), "vol": (1, 4, 4, 4, 4), "seq": (2, 4, 8),
}  # fmt: skip


@functools.cache
def _drawn() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The named tensors, and the generator's state after them: drawn once, which takes longer than most ops."""
    generator = torch.Generator().manual_seed(0)
    m = torch.rand(4, 4, generator=generator) * 0.1 + torch.eye(4) * 0.5
    named = {key: torch.rand(shape, generator=generator) * 0.8 + 0.1 for key, shape in _SHAPES.items()}
    return {"m": m @ m.T, **named}, generator.get_state()


@functools.cache
def _named(arguments: str) -> list[str]:
    return [key for key in ("m", *_SHAPES) if re.search(rf"\b{key}\b", arguments)]


def sample(
    name: str, dtype: torch.dtype, device: str = "cpu", other: torch.dtype | None = None
) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    """`torch.ops.aten.<name>` and the arguments of its sample, floating inputs in `dtype`.

    With `other`, the second tensor of each kind (`y`, `v`, every other `t`) has that dtype instead.
    """
    drawn, state = _drawn()
    generator = torch.Generator()
    generator.set_state(state)
    made = [0]

    def place(values: Callable[[], torch.Tensor], *shape: int, of: torch.dtype) -> torch.Tensor:
        # A FakeTensor is made where it is to live: a build without CUDA can't move one there. It has no values.
        return values().to(of) if device == "cpu" else torch.empty(shape, dtype=of, device=device)

    def t(*shape: int, of: torch.dtype | None = None) -> torch.Tensor:
        made[0] += 1
        of = of or (other if other is not None and made[0] % 2 == 0 else dtype)
        return place(lambda: torch.rand(shape, generator=generator) * 0.8 + 0.1, *shape, of=of)

    def i(*shape: int) -> torch.Tensor:
        return place(lambda: torch.randint(0, 3, shape, generator=generator), *shape, of=torch.int64)

    names: dict[str, Any] = {"torch": torch, "device": device, "dtype": dtype, "i": i, "t": t}
    names |= {"sizes": torch.tensor([2, 2, 2]), "f": lambda *shape: t(*shape, of=torch.float32)}
    for key in _named(SAMPLES[name]):
        of = other if other is not None and key in ("y", "v", "b", "c") else dtype
        names[key] = place(drawn[key].clone, *drawn[key].shape, of=of)
    op, _, overload = name.partition(".")
    function = getattr(torch.ops.aten, op)
    if overload:
        function = getattr(function, overload)
    args, kwargs = eval(f"(lambda *a, **k: (list(a), k))({SAMPLES[name]})", names)
    return function, args, kwargs


def formats_of(result: Any) -> list[torch.dtype]:
    """The dtypes of the floating tensors in a result, in order."""
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return [tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]


# These can't be asked on a FakeTensor of a build without CUDA: they look for CUDA or cuDNN, or read values.
_NAMES = """
    lstm.data gru gru.data gru_cell batch_norm ctc_loss _ctc_loss grid_sampler grid_sampler_2d linalg_lstsq istft geqrf
    cov corrcoef fake_quantize_per_tensor_affine fake_quantize_per_channel_affine
    _fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_channel_affine"""
NOT_FAKEABLE = {
    *_NAMES.split(),
    *(name for name in SAMPLES if "sparse" in name or "spmm" in name),
}

# LAPACK's last bits depend on how its work space happens to be aligned: formats only.
LAPACK = {
    *_GROUPS["m"].split(),
    *(name for name in SAMPLES if name.startswith("linalg_") or name.endswith(("solve", "svd", "qr"))),
    *("geqrf", "pinverse", "nuclear_norm"),
}


def outcome(name: str, dtype: torch.dtype, device: str, other: torch.dtype | None) -> str:
    """What one call returns, as a string: formats, and on the CPU a hash of the bits; an error's type if it raises."""
    function, args, kwargs = sample(name, dtype, device, other)
    torch.default_generator.manual_seed(0)  # some ops are random
    try:
        result = function(*args, **kwargs)
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
    fake = FakeTensorMode()
    for name in SAMPLES:
        for dtype, other in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found[f"cpu {name} {dtype} {other}"] = outcome(name, dtype, "cpu", other)
            if name not in NOT_FAKEABLE and other is None:
                with fake, cuda_autocast(torch.bfloat16):
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


if __name__ == "__main__":  # a process in which Mezzo was never imported
    torch.set_num_threads(1)
    print(json.dumps({"outcomes": under_torch_autocast(), "modules": [*sys.modules]}))
