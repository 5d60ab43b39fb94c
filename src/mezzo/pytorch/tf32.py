"""PyTorch's switch for TF32: off under the policy fp32, on under tf32 where the device has it.

It is one switch for the whole process, read by each product when it runs, in backward too, which is outside any region.
So it stays as it was last put.
"""

from __future__ import annotations

import torch

from mezzo.core.policy import Policy
from mezzo.pytorch.machine import has_tf32


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


def switch_on_tf32() -> None:
    """Have FP32 matmuls, convolutions and RNNs read TF32 factors, on GPUs that can."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


def leaves_autocast_off(policy: Policy, device_type: str) -> bool:
    """Whether a policy's regions need no autocast: FP32, and TF32 by the device's own matrix units."""
    return policy.compute == "fp32" or (policy.compute == "tf32" and has_tf32(device_type))
