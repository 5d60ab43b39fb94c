"""`apex.normalization`: PyTorch's own layers, which are fused too, with Apex's arguments and its `eps`."""

from __future__ import annotations

from typing import Any

from torch import nn


class _Fused:
    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)  # type: ignore[call-arg]


class FusedLayerNorm(_Fused, nn.LayerNorm):
    """`torch.nn.LayerNorm`; `memory_efficient` is ignored."""


class FusedRMSNorm(_Fused, nn.RMSNorm):
    """`torch.nn.RMSNorm`; `memory_efficient` is ignored."""


MixedFusedLayerNorm, MixedFusedRMSNorm = FusedLayerNorm, FusedRMSNorm
