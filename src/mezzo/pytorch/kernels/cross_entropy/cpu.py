"""Rows' losses and gradients on a CPU: compiled loops on PyTorch's threads, a row by one of them."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from mezzo.pytorch.kernels import openmp, specialise
from mezzo.pytorch.kernels.cross_entropy import cpu_gradients as gradients
from mezzo.pytorch.kernels.cross_entropy import cpu_losses as losses
from mezzo.pytorch.kernels.cross_entropy.reference import check_targets

_FORMATS = "mezzo.pytorch.kernels.cross_entropy.cpu_formats"
_NATIVE = "mezzo.pytorch.kernels.native"
_AT_ONCE = 1 << 13  # elements of the rows that a thread takes
_ALONE = 1 << 14  # elements below which one thread is as fast

# dtype -> what its functions in cpu_formats are called, and the type behind it.
_DTYPES: Mapping[torch.dtype, tuple[str, str]] = MappingProxyType(
    {torch.float32: ("fp32", "float32"), torch.bfloat16: ("bf16", "int16"), torch.float16: ("fp16", "int16")}
)


def rows_loss(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """The loss of each row in FP32, and its log-sum-exp in FP64; see `reference`."""
    classes = logits.shape[1]
    target = target.contiguous()
    loss = logits.new_empty(len(logits), dtype=torch.float32)
    lse = logits.new_empty(len(logits), dtype=torch.float64)
    numbers = array("d", (label_smoothing,))
    is_wrong = array("q", (0,))
    sums = None if weight is None else _sums(weight)
    job = [0] * losses.JOB_WORDS
    _describe(job, logits, target, ignore_index)
    job[losses.SMOOTHING] = numbers.buffer_info()[0]
    job[losses.WEIGHTS] = 0 if weight is None else weight.data_ptr()
    job[losses.WEIGHT_SUMS] = 0 if sums is None else sums.buffer_info()[0]
    job[losses.LOSSES], job[losses.LSES] = loss.data_ptr(), lse.data_ptr()
    job[losses.IS_WRONG] = is_wrong.buffer_info()[0]
    _run(_losses(logits.dtype), job, logits)
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
    target, lse = target.contiguous(), lse.contiguous()
    every = logits.shape[1] if weight is None else weight.sum(dtype=torch.float64).item()
    numbers = array("d", (label_smoothing, every))
    nan = _nan(out.dtype)
    job = [0] * gradients.JOB_WORDS
    _describe(job, logits, target, ignore_index)
    job[gradients.NUMBERS] = numbers.buffer_info()[0]
    job[gradients.WEIGHTS] = 0 if weight is None else weight.data_ptr()
    job[gradients.LSES], job[gradients.SCALES] = lse.data_ptr(), scale.data_ptr()
    job[gradients.SCALE_STRIDE] = scale.stride(0)
    job[gradients.GRADIENTS], job[gradients.NAN] = out.data_ptr(), nan.data_ptr()
    job[gradients.GRADIENT_STRIDE] = out.stride(0) * out.element_size()
    _run(_gradients(logits.dtype, out.dtype), job, logits)


def _describe(job: list[int], logits: Tensor, target: Tensor, ignore_index: int) -> None:
    """Write what both jobs begin with."""
    n, classes = logits.shape
    job[losses.ROWS], job[losses.CLASSES] = n, classes
    job[losses.STRIDE] = logits.stride(0) * logits.element_size()
    job[losses.ROWS_AT_ONCE] = max(1, _AT_ONCE // max(1, classes))
    job[losses.LOGITS], job[losses.TARGETS] = logits.data_ptr(), target.data_ptr()
    job[losses.IGNORED] = ignore_index


def _run(kernel: specialise.Kernel, words: list[int], logits: Tensor) -> None:
    job = array("q", words)
    call = openmp.alone if logits.numel() <= _ALONE else openmp.parallel
    call(kernel.address, job.buffer_info()[0])


def _sums(weight: Tensor) -> array[float]:
    """The sum of each block of class weights."""
    starts = np.arange(0, len(weight), losses.BLOCK)
    return array("d", np.add.reduceat(weight.double().numpy(), starts))


@functools.cache
def _nan(dtype: torch.dtype) -> Tensor:
    """One NaN, for those who need its pattern."""
    return torch.full((1,), torch.nan, dtype=dtype, device="cpu")


@functools.cache
def _losses(dtype: torch.dtype) -> specialise.Kernel:
    name, element = _DTYPES[dtype]
    bindings = {
        "largest": f"{_FORMATS}:largest_{name}",
        "load_logit": f"{_FORMATS}:load_{name}",
        "logit_at": f"{_NATIVE}:{element}_at",
    }
    return specialise.kernel(losses, bindings)


@functools.cache
def _gradients(dtype: torch.dtype, out: torch.dtype) -> specialise.Kernel:
    name, element = _DTYPES[dtype]
    out_name, out_element = _DTYPES[out]
    bindings = {
        "load_logit": f"{_FORMATS}:load_{name}",
        "logit_at": f"{_NATIVE}:{element}_at",
        "store_gradient": f"{_FORMATS}:store_{out_name}",
        "gradient_at": f"{_NATIVE}:{out_element}_at",
    }
    return specialise.kernel(gradients, bindings)
