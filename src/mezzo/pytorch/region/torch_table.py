"""PyTorch's own autocast tables, as data: op -> category, for CPU and CUDA.

Taken from ATen/autocast_mode.h and autocast_mode.cpp of torch 2.13. Mezzo registers a kernel only where a
policy's rule differs from these lists, so they must be right: a test asks the dispatcher itself, for every
ATen op, whether it has an autocast kernel, and compares. Where another release of torch lacks one of these
kernels the dispatcher has the last word (`category`).

Categories: ``lower`` (inputs to autocast's dtype), ``fp32`` (inputs to FP32), ``fp32_dtype`` (output dtype
set to FP32, input left as it is), ``promote`` (widest input), ``banned``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

_CPU = {
    "lower": """conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm linalg_vecdot baddbmm
    addmm
        _addmm_activation addbmm linear _convolution.deprecated matmul conv_tbc mkldnn_rnn_layer
        conv_transpose1d conv_transpose2d.input conv_transpose3d.input prelu scaled_dot_product_attention
        _native_multi_head_attention""",
    "fp32": """avg_pool3d binary_cross_entropy grid_sampler polar prod prod.dim_int quantile
        quantile.scalar nanquantile nanquantile.scalar stft stft.center cdist grid_sampler_2d
        _grid_sampler_2d_cpu_fallback grid_sampler_3d trace view_as_complex cholesky cholesky_inverse
        cholesky_solve inverse lu_solve orgqr ormqr pinverse max_pool3d max_unpool2d max_unpool3d
        adaptive_avg_pool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
        replication_pad3d mse_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
        poisson_nll_loss smooth_l1_loss cross_entropy_loss l1_loss huber_loss margin_ranking_loss
        soft_margin_loss triplet_margin_loss multi_margin_loss ctc_loss.IntList ctc_loss.Tensor kl_div
        multilabel_margin_loss binary_cross_entropy_with_logits fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn
        fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft linalg_cond
        linalg_cond.p_str linalg_matrix_rank linalg_matrix_rank.tol_tensor linalg_matrix_rank.atol_rtol_tensor
        linalg_matrix_rank.atol_rtol_float linalg_solve linalg_cholesky linalg_svdvals linalg_eigvals
        linalg_eigvalsh linalg_inv linalg_householder_product linalg_tensorinv linalg_tensorsolve
        fake_quantize_per_tensor_affine geqrf _lu_with_info qr svd triangular_solve fractional_max_pool2d
        fractional_max_pool3d adaptive_max_pool3d multilabel_margin_loss_forward linalg_qr linalg_cholesky_ex
        linalg_svd linalg_eig linalg_eigh linalg_lstsq linalg_inv_ex""",
    "promote": "stack cat index_copy",
}

_CUDA = {
    "lower": """_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv
        linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
        _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
        _scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution
        cudnn_convolution_transpose""",
    "fp32": """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar
        pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
        frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
        cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
        huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
        multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
        upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
        upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa norm.Scalar
        norm.ScalarOpt_dim""",
    "fp32_dtype": """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
        linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList""",
    "promote": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    "banned": "binary_cross_entropy",
}


def _by_op(lists: Mapping[str, str]) -> dict[str, str]:
    return {op: category for category, ops in lists.items() for op in ops.split()}


TORCH_TABLE: Mapping[str, Mapping[str, str]] = {"cpu": _by_op(_CPU), "cuda": _by_op(_CUDA)}

# The dispatcher's key for a device type, as `torch.library` spells it.
AUTOCAST_KEYS: Mapping[str, str] = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "xpu": "AutocastXPU",
    "mps": "AutocastMPS",
    "hpu": "AutocastHPU",
    "mtia": "AutocastMTIA",
}


def has_kernel(op: str, device_type: str) -> bool:
    """Whether the dispatcher has an autocast kernel for `aten::op` or `aten::op.overload` on this kind of
    device.

    Once Mezzo has registered one this is True whatever PyTorch does: `mezzo.pytorch.region.dispatch` asks before.
    """
    name = op if "::" in op else f"aten::{op}"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, AUTOCAST_KEYS[device_type]))
