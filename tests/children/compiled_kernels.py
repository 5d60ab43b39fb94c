"""Compiles kinds of the step for a Hopper, without one, and prints what came out: a JSON object a line.

``python compiled_kernels.py '[["adamw", [["split", "fp32", "bfloat16"]]]]'``: rule, and the rows of one model.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import stepper_cases as cases
from mezzo.pytorch.kernels.optimizer_step import pointer_table
from mezzo.pytorch.kernels.optimizer_step import triton as step

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SIGNATURE = {
    **dict.fromkeys(("chunks", "rows", "current"), "*i64"),
    "hypers": "*fp64",
    "tickets": "*i32",
    **dict.fromkeys(("multiplier", "found_inf", "overflow"), "*fp32"),
    "blocks": "i32",
    "KINDS": "constexpr",
}
WIDTHS = {"own": [4], "fp32": [2, 4], "fp16": [2, 4], "split": [2, 2], "split8": [2, 1], "none": [2]}
VECTORS = {4: "v4.b32", 2: "v2.b32", 1: "b32"}
STATES = {"fp32": 4, "bf16": 2, "int8": 1}


def report(rule: str, modes: list[list[str]]) -> dict[str, object]:
    hyper = cases.HYPERS[rule]
    rows = [cases.row(hyper, (m, s, getattr(torch, g)), 1, 0) for m, s, g in modes]
    constants = {"KINDS": tuple(sorted({pointer_table.kind(row, hyper) for row in rows}))}
    source = ASTSource(step.step_kernel, signature=SIGNATURE, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(step.OPTIONS))
    assembly = made.asm["ptx"]
    needed = {STATES[mode[1]] for mode in modes if hyper.states} | {
        width for mode in modes for width in WIDTHS[mode[0]]
    }
    machine, registers, spilled = disassembled(made.asm["cubin"])
    return {
        "fma": len(re.findall(r"\bfma\.rn\.f32\b", assembly)),
        "inexact": sorted(
            set(re.findall(r"\b(?:fma|mad|div|sqrt|rcp|ex2)\.[\w.]*f32\b|\S+\.ftz\S*", assembly)) - EXACT
        ),
        "machine_fma": len(re.findall(r"\bFFMA\b", machine)),
        "registers": registers,
        "spilled_bytes": spilled,
        "vectors": [
            (assembly.count(f"ld.global.{VECTORS[w]}"), assembly.count(f"st.global.{VECTORS[w]}"), w)
            for w in sorted(needed)
        ],
    }


EXACT = {"div.rn.f32", "sqrt.rn.f32", "fma.rn.f32"}


def disassembled(cubin: bytes) -> tuple[str, int, int]:
    """Machine instructions, registers a thread, and bytes of its stack."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        machine = subprocess.run(
            [TOOLS / "nvdisasm", "-c", file], capture_output=True, text=True, check=True
        ).stdout
        command = [TOOLS / "cuobjdump", "-res-usage", file]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return machine, int(found[1]), int(found[2])


for rule, modes in json.loads(sys.argv[1]):
    print(json.dumps(report(rule, modes)), flush=True)
