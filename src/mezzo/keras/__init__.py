"""Mezzo for Keras 3, on its TensorFlow, JAX and PyTorch backends; `import mezzo.keras` alone imports no Keras."""

from __future__ import annotations

from mezzo.core.lazy import lazy

# Public name -> its module.
_PUBLIC = {
    "LossScaleOptimizer": "mezzo.keras.loss_scale_optimizer",
    "PolicyWarning": "mezzo.keras.policy",
    "PrecisionMonitor": "mezzo.keras.callback",
    "SixteenBitOutputWarning": "mezzo.keras.policy",
    "layer_policies": "mezzo.keras.layers",
    "set_policy": "mezzo.keras.policy",
}
__all__ = list(_PUBLIC)

__getattr__, __dir__ = lazy(
    __name__,
    _PUBLIC,
    {
        "keras": "Install Keras 3 and one of its backends: pip install 'keras>=3.12' tensorflow (or jax, or torch).",
        "tensorflow": "It is Keras's default backend: pip install tensorflow, or set KERAS_BACKEND=torch or jax.",
        "jax": "KERAS_BACKEND names it: pip install jax, or set KERAS_BACKEND=torch or tensorflow.",
    },
    {
        "check_outputs": "was removed in version 0.2. The first call after model.compile(...) warns of "
        'outputs in 16 bits; warnings.simplefilter("error", mezzo.keras.SixteenBitOutputWarning) raises instead.',
    },
)
