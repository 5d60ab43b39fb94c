"""Compiles kinds of the step for a Hopper, without one, and prints what came out: a JSON object a line.

``python compiled_kernels.py '[["adamw", [["split", "fp32", "bfloat16"]]]]'``: rule, and the rows of one model.
"""

from __future__ import annotations

import json
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import stepper_cases as cases
from mezzo.pytorch.kernels.optimizer_step import triton as step

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
    constants = {"KINDS": tuple(sorted({step.kind_of(row, hyper) for row in rows}))}
    source = ASTSource(step.step_kernel, signature=SIGNATURE, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(step.OPTIONS))
    assembly = made.asm["ptx"]
    needed = {STATES[mode[1]] for mode in modes if hyper.states} | {
        width for mode in modes for width in WIDTHS[mode[0]]
    }
    return {
        "fma": len(re.findall(r"\bfma\.rn\.f32\b", assembly)),
        "inexact": sorted(
            set(re.findall(r"\b(?:fma|mad|div|sqrt|rcp|ex2)\.[\w.]*f32\b|\S+\.ftz\S*", assembly)) - EXACT
        ),
        "vectors": [
            (assembly.count(f"ld.global.{VECTORS[w]}"), assembly.count(f"st.global.{VECTORS[w]}"), w)
            for w in sorted(needed)
        ],
    }


EXACT = {"div.rn.f32", "sqrt.rn.f32", "fma.rn.f32"}


for rule, modes in json.loads(sys.argv[1]):
    print(json.dumps(report(rule, modes)), flush=True)
