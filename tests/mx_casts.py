"""torchao's MX casts of a table of inputs, as digests: what `tests/test_recipes.py` compares Mezzo's casts with.

python tests/mx_casts.py      # with torchao installed; writes tests/mx_casts.json
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

FILE = Path(__file__).with_suffix(".json")
MODES = {"e8m0": "RCEIL", "e8m0-floor": "FLOOR"}
ELEMENTS = ("e4m3fn", "e5m2")


def inputs() -> Tensor:
    """A block of 32 for every finite bf16 value, which is its largest: the other elements are parts of it."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    parts = torch.arange(-15, 17, dtype=torch.float32) / 16
    return (every[every.isfinite()].float()[:, None] * parts).bfloat16()


def digest(scales: Tensor, codes: Tensor) -> str:
    """Of the biased exponents [blocks], and of the codes [blocks, 32] of those whose exponent is not 0."""
    kept = codes.view(torch.uint8)[scales > 0]
    return hashlib.sha256(bytes(scales.numpy()) + bytes(kept.contiguous().numpy())).hexdigest()


def main() -> None:
    import torchao
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    found = {}
    for scale, mode in MODES.items():
        for element in ELEMENTS:
            dtype = getattr(torch, f"float8_{element}")
            scales, codes = to_mx(inputs(), dtype, 32, ScaleCalculationMode[mode])
            found[f"{element} {scale}"] = digest(scales.view(torch.uint8).flatten(), codes)
    written = {"torchao": torchao.__version__, "torch": torch.__version__, "digests": found}
    FILE.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
