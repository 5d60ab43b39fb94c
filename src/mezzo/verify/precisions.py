"""The precisions that a command line names: a policy string has commas of its own, and so has a list of them."""

from __future__ import annotations

from collections.abc import Sequence


def split_precisions(words: Sequence[str]) -> list[str]:
    """The precisions in the values of `--precision`, in order.

    A word is split at its commas, except that what holds an ``=`` belongs to the policy string before it.

    >>> split_precisions(["fp32,bf16", "bf16,op.softmax=fp32,fp16", "params=fp32,compute=bf16"])
    ['fp32', 'bf16', 'bf16,op.softmax=fp32', 'fp16', 'params=fp32,compute=bf16']
    """
    found: list[str] = []
    for word in words:
        parts: list[str] = []
        for piece in (piece.strip() for piece in word.split(",")):
            if not piece:
                continue
            if "=" in piece and parts and not parts[-1].endswith(".toml"):
                parts[-1] += f",{piece}"
            else:
                parts.append(piece)
        found += parts
    return found
