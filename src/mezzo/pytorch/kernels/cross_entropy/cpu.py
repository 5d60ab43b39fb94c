"""Rows' losses and gradients on a CPU: compiled loops on PyTorch's threads, a row by one of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mezzo.pytorch.kernels import openmp, specialise
from mezzo.pytorch.kernels.cross_entropy import cpu_gradients as gradients
from mezzo.pytorch.kernels.cross_entropy import cpu_losses as losses
from mezzo.pytorch.kernels.cross_entropy.reference import check_targets

_FORMATS = "mezzo.pytorch.kernels.cross_entropy.cpu_formats"
_AT_ONCE = 1 << 13  # elements of the rows that a thread takes
_ALONE = 1 << 14  # elements below which one thread is as fast

# dtype -> what its functions in cpu_formats are called, and the type behind it.
_DTYPES: Mapping[torch.dtype, tuple[str, str]] = MappingProxyType(
    {torch.float32: ("fp32", "float32"), torch.bfloat16: ("bf16", "int16"), torch.float16: ("fp16", "int16")}
)

Words = npt.NDArray[np.int64]


def rows_loss(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """The loss of each row in FP32, and its log-sum-exp in FP64; see `reference`."""
    n, classes = logits.shape
    target = target.contiguous()
    loss, lse = torch.empty(n, dtype=torch.float32), torch.empty(n, dtype=torch.float64)
    smoothing, is_wrong = np.array([label_smoothing]), np.zeros(1, np.int64)
    job = _job(losses.JOB_WORDS, logits, target, ignore_index)
    job[losses.SMOOTHING] = smoothing.ctypes.data
    if weight is not None:
        weight_sums = np.add.reduceat(weight.double().numpy(), np.arange(0, classes, losses.BLOCK))
        job[losses.WEIGHTS], job[losses.WEIGHT_SUMS] = weight.data_ptr(), weight_sums.ctypes.data
    job[losses.LOSSES], job[losses.LSES] = loss.data_ptr(), lse.data_ptr()
    job[losses.IS_WRONG] = is_wrong.ctypes.data
    name, element = _DTYPES[logits.dtype]
    kernel = specialise.kernel(
        losses,
        {
            "largest": f"{_FORMATS}:largest_{name}",
            "load_logit": f"{_FORMATS}:load_{name}",
            "logit_at": f"mezzo.pytorch.kernels.native:{element}_at",
        },
    )
    _run(kernel, job, logits)
    if is_wrong[0]:
        check_targets(target, classes, ignore_index)
    return loss, lse


def rows_gradient(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    out: Tensor,
) -> None:
    """Write each row's gradient times its scale into `out`; see `reference`."""
    target, lse, scale = target.contiguous(), lse.contiguous(), scale.contiguous()
    every = logits.shape[1] if weight is None else weight.sum(dtype=torch.float64).item()
    numbers = np.array([label_smoothing, every], np.float64)
    nan = torch.full((1,), torch.nan, dtype=out.dtype)
    job = _job(gradients.JOB_WORDS, logits, target, ignore_index)
    job[gradients.NUMBERS] = numbers.ctypes.data
    job[gradients.WEIGHTS] = 0 if weight is None else weight.data_ptr()
    job[gradients.LSES], job[gradients.SCALES] = lse.data_ptr(), scale.data_ptr()
    job[gradients.GRADIENTS], job[gradients.NAN] = out.data_ptr(), nan.data_ptr()
    job[gradients.GRADIENT_STRIDE] = out.stride(0) * out.element_size()
    name, element = _DTYPES[logits.dtype]
    out_name, out_element = _DTYPES[out.dtype]
    kernel = specialise.kernel(
        gradients,
        {
            "load_logit": f"{_FORMATS}:load_{name}",
            "logit_at": f"mezzo.pytorch.kernels.native:{element}_at",
            "store_gradient": f"{_FORMATS}:store_{out_name}",
            "gradient_at": f"mezzo.pytorch.kernels.native:{out_element}_at",
        },
    )
    _run(kernel, job, logits)


def _job(words: int, logits: Tensor, target: Tensor, ignore_index: int) -> Words:
    """What both jobs begin with."""
    n, classes = logits.shape
    job = np.zeros(words, np.int64)
    job[losses.ROWS], job[losses.CLASSES] = n, classes
    job[losses.STRIDE] = logits.stride(0) * logits.element_size()
    job[losses.ROWS_AT_ONCE] = max(1, _AT_ONCE // max(1, classes))
    job[losses.LOGITS], job[losses.TARGETS] = logits.data_ptr(), target.data_ptr()
    job[losses.IGNORED] = ignore_index
    return job


def _run(kernel: specialise.Kernel, job: Words, logits: Tensor) -> None:
    call = openmp.alone if logits.numel() <= _ALONE else openmp.parallel
    call(kernel.address, job.ctypes.data)
