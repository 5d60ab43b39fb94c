"""TF32 off: under the policy fp32 a matmul or a convolution is computed in FP32 and in nothing shorter."""

from __future__ import annotations

import torch


def switch_off_tf32() -> bool:
    """Have matmuls, convolutions and RNNs computed in true FP32, on GPUs and CPUs; whether the script had
    asked for less.

    A CPU has short cuts of the same kind: `set_float32_matmul_precision("medium")` computes in bf16 there.
    cuDNN's convolutions use TF32 by default, which is nobody's request.
    """
    asked = torch.get_float32_matmul_precision() != "highest"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    return asked
