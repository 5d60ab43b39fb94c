"""The fused multiply-add ``a * b + c`` of FP32 numbers: IEEE 754's, one rounding and not two.

Some update rules have it in named places, where PyTorch's own optimizers have it too: `Tensor.add` with an `alpha`
is one. Compiled for a CPU it is `native.fma`, for a GPU the machine's instruction.
"""
