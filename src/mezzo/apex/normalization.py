"""`apex.normalization`: PyTorch's own layers, which are fused too."""

from torch.nn import LayerNorm, RMSNorm

FusedLayerNorm = MixedFusedLayerNorm = LayerNorm
FusedRMSNorm = MixedFusedRMSNorm = RMSNorm
