"""`apex.normalization`: PyTorch's own layers, which are fused too."""

from typing import Any

from torch.nn import LayerNorm, RMSNorm


class FusedRMSNorm(RMSNorm):
    """PyTorch's, with Apex's `eps`."""

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)


FusedLayerNorm = MixedFusedLayerNorm = LayerNorm
MixedFusedRMSNorm = FusedRMSNorm
