"""How parameters and the optimizer's moments are stored: which masters go with which format, and their bytes.

A 16-bit weight moves in steps of its ulp, and most updates are smaller. Its *master* is the FP32 value that the
optimizer updates; the weight is that value rounded.
"""

from __future__ import annotations

from mezzo.core.errors import UsageError

# What may keep the FP32 value of a parameter stored in each format; the first is taken where none is named.
_MASTERS_OF = {"fp32": ("fp32",), "bf16": ("split", "fp32", "split8", "none"), "fp16": ("fp32",)}

_WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
_MASTER_BYTES = {"fp32": 4.0, "split": 2.0, "split8": 1.0, "none": 0.0}
_STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 2.0 / 64.0}  # int8: a bf16 scale for 64 codes

MASTERS = tuple(_MASTER_BYTES)
STATE_FORMATS = tuple(_STATE_BYTES)


def usual_masters(params: str) -> str:
    """The masters of parameters in this format where none are named: ``split`` for bf16, else ``fp32``."""
    return _MASTERS_OF[params][0]


def storage_of(compute: str, params: str, masters: str) -> tuple[str, str]:
    """What parameters are stored in, and how their FP32 values are kept, with ``auto`` replaced in both.

    >>> storage_of("bf16", "auto", "split8"), storage_of("bf16", "bf16", "auto"), storage_of("bf16", "auto", "auto")
    (('bf16', 'split8'), ('bf16', 'split'), ('fp32', 'fp32'))
    """
    if params == "auto" and masters != "auto" and compute == "auto":
        raise UsageError(
            f"policy 'compute=auto,masters={masters}': masters need 16-bit parameters, and auto may choose FP32. Name "
            "the format: compute=bf16, or params=bf16."
        )
    if params == "auto":
        params = "fp32" if masters == "auto" else compute
    if masters == "auto":
        masters = usual_masters(params)
    if masters in _MASTERS_OF[params]:
        return params, masters
    where = f"policy 'params={params},masters={masters}': "
    if params == "fp32":
        raise UsageError(
            f"{where}an FP32 parameter is its own master. Leave masters out, or store parameters in 16 bits: "
            "params=bf16."
        )
    raise UsageError(
        f"{where}{masters} masters exist for bf16 only. Use bf16, or masters=fp32 in mezzo.MixedPrecision (mezzo run "
        "can't train fp16 weights)."
    )


def bytes_per_parameter(params: str, masters: str, state: str, *, moments: int = 2) -> float:
    """Bytes of one parameter in training: weight, master, gradient (in the weight's format), the optimizer's moments.

    >>> bytes_per_parameter("fp32", "fp32", "fp32"), bytes_per_parameter("bf16", "split8", "int8")
    (16.0, 7.0625)
    """
    master = 0.0 if params == "fp32" else _MASTER_BYTES[masters]
    return 2.0 * _WEIGHT_BYTES[params] + master + moments * _STATE_BYTES[state]
