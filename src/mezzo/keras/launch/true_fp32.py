"""Have FP32 computed in true FP32: TF32 off, which some backends use unasked."""

from __future__ import annotations

import sys
from typing import Any


def switch_off_tf32(backend: str) -> None:
    """Switch TF32 (and a CPU's short cuts of the same kind) off, in the backend that the script has imported."""
    module: Any = sys.modules[backend]
    if backend == "tensorflow":
        module.config.experimental.enable_tensor_float_32_execution(False)
    elif backend == "jax":
        module.config.update("jax_default_matmul_precision", "highest")
    else:
        module.set_float32_matmul_precision("highest")
        module.backends.cudnn.allow_tf32 = False
