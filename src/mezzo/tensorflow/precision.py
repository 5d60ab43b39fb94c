"""In which format the graph rewrite computes here, and by which option of grappler: decided before anything is set.

======== ============================ ========================================= ==========================
choice   grappler's option            what it does                              loss scale
======== ============================ ========================================= ==========================
`fp16`   auto_mixed_precision         FP16 on GPUs from compute capability 7.0  as asked for, else dynamic
`bf16`   auto_mixed_precision_        BF16 through oneDNN on a CPU              none, unless asked for
         onednn_bfloat16
`fp32`   none                         nothing                                   none, unless asked for
======== ============================ ========================================= ==========================

`auto` is fp16 where there is such a GPU; else bf16, if the CPU multiplies it natively; else fp32.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from mezzo.core.errors import UnsupportedPrecisionError, UsageError, unknown_name

PRECISIONS = ("auto", "fp16", "bf16")
# Those, and what TensorFlow and Keras call them.
NAMES: Mapping[str, str] = {
    **{name: name for name in PRECISIONS},
    "float16": "fp16",
    "mixed_float16": "fp16",
    "bfloat16": "bf16",
    "mixed_bfloat16": "bf16",
}
FULL = ("fp32", "float32", "none", "off")
ASSUME_NATIVE = "MEZZO_ASSUME_NATIVE"
SIMULATE_GPU = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_SIMULATE_GPU"

# Choice -> mode of `mezzo.tensorflow.op_lists`, whose option turns the pass on.
MODES: Mapping[str, str] = {"fp16": "cuda", "bf16": "onednn_bfloat16"}

_TENSOR_CORES = (7, 0)
_CPU_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})  # as /proc/cpuinfo spells them


@dataclass(frozen=True)
class Choice:
    """What was chosen.

    Args:
        precision: `fp16`, `bf16` or `fp32`.
        why: in words, for whoever reads the one line.
    """

    precision: str
    why: str

    def __str__(self) -> str:
        return f"{self.precision} ({self.why})"


def choose(precision: str) -> Choice:
    """The format for this machine.

    Args:
        precision: "auto", "fp16" or "bf16", or another name of these, in capitals or not.

    Raises:
        UnknownNameError: none of these; UsageError: FP32, which is to leave the rewrite out.
        UnsupportedPrecisionError: the rewrite cannot compute in it here.
    """
    given, precision = precision, str(precision).lower()
    if precision in FULL:
        raise UsageError(
            f"enable_mixed_precision_graph_rewrite: precision is {given!r}, and the rewrite is what computes in less. "
            "Leave the call out and use the optimizer as it is; if a rewrite is on, "
            "disable_mixed_precision_graph_rewrite() turns it off."
        )
    if precision not in NAMES:
        raise unknown_name(
            "precision", str(given), PRECISIONS, where="enable_mixed_precision_graph_rewrite: "
        )
    precision = NAMES[precision]
    gpu = _gpu()
    if precision == "fp16" and gpu is None:
        raise UnsupportedPrecisionError(
            "precision='fp16': TensorFlow's graph rewrite computes in FP16 on NVIDIA GPUs from compute capability "
            f"{'.'.join(map(str, _TENSOR_CORES))}, and TensorFlow sees none here. Use precision='auto', or 'bf16', "
            "which it does on CPUs."
        )
    if precision == "bf16" and gpu is not None:
        raise UnsupportedPrecisionError(
            f"precision='bf16': TensorFlow's graph rewrite computes in BF16 on CPUs alone, and here is {gpu}. Use "
            "precision='auto' or 'fp16'; or train in BF16 by a policy, mezzo.keras.set_policy('bf16')."
        )
    onednn = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1") not in ("0", "false")
    if precision == "bf16" and not onednn:
        raise UnsupportedPrecisionError(
            "precision='bf16': the graph rewrite computes in BF16 through oneDNN, which TF_ENABLE_ONEDNN_OPTS=0 turns "
            "off. Unset it."
        )
    if gpu is not None:
        return Choice("fp16", f"on {gpu}")
    if not onednn:
        return Choice("fp32", "no GPU, and TF_ENABLE_ONEDNN_OPTS=0 leaves none of the rewrites for a CPU")
    if _cpu_multiplies_bf16():
        return Choice("bf16", "no GPU, and this CPU multiplies BF16 through oneDNN")
    if precision == "bf16":
        return Choice(
            "bf16", "as asked; this CPU has no BF16 instructions, so expect it to be slower than FP32"
        )
    return Choice(
        "fp32", "no GPU, and this CPU has no BF16 instructions; precision='bf16' would emulate them"
    )


def _gpu() -> str | None:
    """The name of a GPU that the rewrite serves, if TensorFlow may use one."""
    for device in tf.config.get_visible_devices("GPU"):
        details = tf.config.experimental.get_device_details(device)
        if tuple(details.get("compute_capability") or (0, 0)) >= _TENSOR_CORES:
            return str(details.get("device_name") or device.name)
    return "the GPU that TensorFlow simulates" if os.environ.get(SIMULATE_GPU, "") in ("1", "true") else None


def _cpu_multiplies_bf16() -> bool:
    assumed = os.environ.get(ASSUME_NATIVE)
    if assumed is not None:
        return "bf16" in assumed.split(",")
    return bool(_CPU_BF16 & _cpu_flags())


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return frozenset()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(flags.partition(":")[2].split())
