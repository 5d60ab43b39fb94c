"""torchao's MX and NVFP4 casts of a table of inputs, as digests: what `tests/test_recipes.py` compares Mezzo's with.

python tests/mx_casts.py CHECKOUT     # of pytorch/ao, which has the reference of NVFP4; writes tests/mx_casts.json
"""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FILE = Path(__file__).with_suffix(".json")
MODES = {"e8m0": "RCEIL", "e8m0-floor": "FLOOR"}
# Each element with torchao's name of it.
ELEMENTS = {
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e3m2": "fp6_e3m2",
    "e2m3": "fp6_e2m3",
    "e2m1": torch.float4_e2m1fn_x2,
}


def inputs() -> Tensor:
    """A block of 32 for every finite bf16 value, which is its largest: the other elements are parts of it."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    parts = torch.arange(-15, 17, dtype=torch.float32) / 16
    return (every[every.isfinite()].float()[:, None] * parts).bfloat16()


def digest(scales: Tensor, codes: Tensor) -> str:
    """Of the biased exponents [blocks], and of the codes [blocks, 32], a byte each, where the exponent is not 0."""
    kept = codes.view(torch.uint8)[scales > 0]
    return hashlib.sha256(bytes(scales.numpy()) + bytes(kept.contiguous().numpy())).hexdigest()


NVFP4 = ("1x16", "16x16", "1x16 transposed", "16x16 transposed", "1x16 hadamard")
REFERENCE = "test/prototype/moe_training/nvfp4_training/nvfp4_reference.py"


def nvfp4_inputs(case: str) -> dict[str, Tensor]:
    """Matrices by what is awkward about them; with Hadamard those whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(0)
    whole = (torch.randn(160, 128, generator=generator) * 64).round() / 64
    made = {"even": whole, "padding": whole[:33, :77], "one row": whole[:1, :16], "zero": torch.zeros(16, 32)}
    if case.endswith("hadamard"):
        return {name: x.bfloat16() for name, x in made.items()}
    wide = whole * 2.0 ** torch.randint(-14, 10, whole.shape, generator=generator)
    blocks = wide.clone()
    blocks[:32, :64] = 0
    blocks[64:] *= 2.0**-17  # scales below e4m3fn's normal values, and zero
    halves = torch.arange(17, 32, 2) / 16 * 2.0 ** torch.arange(-10, 9)[:, None]  # between two e4m3fn
    scales = torch.cat([halves.flatten(), torch.tensor([448.0])]).clamp(max=448)[:, None] * torch.ones(16)
    # The largest of a block is a bf16 value; 2^16 is the range of scales below the largest of the tensor.
    bf16 = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    for first in range(0, 0x7F80, 16 << 7):
        parts = torch.linspace(-1, 1, 16) * bf16[first : first + (17 << 7)][:, None]
        made[f"exponents from {first >> 7}"] = parts.bfloat16()
    return {
        **made,
        "wide": wide.bfloat16(),
        "float32": torch.randn(64, 64, generator=generator),
        "ties of scales": scales.repeat_interleave(16, 0),
        "zero blocks": blocks,
        "minus zero": -torch.zeros(32, 32),
        "subnormal": torch.randn(32, 64, generator=generator) * 2.0**-130,
        "smallest": torch.eye(16) * 2.0**-149,
        "largest": wide.sign() * torch.finfo(torch.float32).max,
        "ties": torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(16, 4) * 448,
    }


def digest_nvfp4(scales: Tensor, codes: Tensor, of_tensor: Tensor) -> str:
    """Of the blocks' scales, of the codes in a byte each, and of the tensor's scale."""
    parts = (scales.to(torch.float8_e4m3fn).view(torch.uint8), codes, of_tensor.view(1).view(torch.uint8))
    return hashlib.sha256(b"".join(bytes(part.contiguous().numpy()) for part in parts)).hexdigest()[:16]


def nvfp4_of_torchao(reference: dict[str, Any], x: Tensor, case: str) -> str:
    """The digest for a matrix [R, C], padded to whole blocks; transposed or with Hadamard: of what sums over R."""
    block, _, form = case.partition(" ")
    down, across = (16 if block == "16x16" or summed else 1 for summed in (form, not form))
    x = F.pad(x, (0, -x.shape[1] % across, 0, -x.shape[0] % down))
    x = reference["reference_rht"](x) if form == "hadamard" else x.t() if form else x
    largest = x.float().abs().max()
    made = reference["nvfp4_reference_quantize"](x.contiguous(), largest, block=block)
    codes = torch.stack([made.codes & 15, made.codes >> 4], -1).flatten(1)
    scales = made.block_scale
    codes, scales = (codes.t(), scales.t()) if form else (codes, scales)
    return digest_nvfp4(scales, codes, 1.0 / reference["global_encode_scale"](largest))


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    found = {}
    for scale, mode in MODES.items():
        for element, dtype in ELEMENTS.items():
            scales, codes = to_mx(inputs(), dtype, 32, ScaleCalculationMode[mode])
            if element == "e2m1":  # two in a byte
                codes = torch.stack([codes & 15, codes >> 4], -1)
            found[f"{element} {scale}"] = digest(scales.view(torch.uint8).flatten(), codes.reshape(-1, 32))
    reference = runpy.run_path(str(Path(sys.argv[1]) / REFERENCE))
    nvfp4 = {
        case: {name: nvfp4_of_torchao(reference, x, case) for name, x in nvfp4_inputs(case).items()}
        for case in NVFP4
    }
    version = (Path(sys.argv[1]) / "version.txt").read_text(encoding="utf-8").strip()
    written = {"torchao": version, "torch": torch.__version__, "digests": found, "nvfp4": nvfp4}
    FILE.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
