"""Where a script's own text makes 16-bit weights or mixed precision; it is not run. For `mezzo doctor SCRIPT`."""

from __future__ import annotations

import ast
import re
from importlib import metadata

from mezzo.core.errors import UsageError

WEIGHTS, MIXED = "16-bit weights without masters", "mixed precision of its own"
# The command that measures it, and the one that repairs or replaces it, each with what it does.
NEXT = {
    WEIGHTS: {"run": "Measure what is lost", "run --masters split": "Keep it"},
    MIXED: {"compare": "Compare it with FP32", "run --own off --precision bf16": "Replace it"},
}

_HALVES = {"torch.bfloat16", "torch.float16", "torch.half", "'bfloat16'", "'float16'"}
_MADE = re.compile(r"([a-z_]\w*\.)*(?!Tensor)[A-Z]\w*(\.from_\w+)?\(")  # a new module
_LOADED = re.compile(r"(?!Peft)[\w.]*(Model|For[A-Z])\w*\.from_pretrained\(")  # not a tokenizer
_MIXES = re.compile(r"(torch\.)?((cuda|cpu)\.)?(amp\.)?(autocast|GradScaler)\((?!.*enabled=False)")
_SETTING = re.compile(r"(mixed_precision|precision)='?(bf16|fp16|fp8|16)|(bf16|fp16)=True$")


def findings(text: str, name: str) -> list[tuple[int, str, str]]:
    """Line, kind and code of each. Not known: imported modules, and a format that an option gives."""
    try:
        nodes = list(ast.walk(ast.parse(text, name)))
    except SyntaxError as error:
        raise UsageError(f"{name} is not Python: {error.msg} in line {error.lineno}") from error
    assigned = [one for one in nodes if isinstance(one, ast.Assign)]
    made = {ast.unparse(one.value): ast.unparse(one.targets[0]) for one in assigned}
    halves = _HALVES | {target for value, target in made.items() if value in _HALVES}
    calls = [(one, *ast.unparse(one.func).rpartition(".")[::2]) for one in nodes if isinstance(one, ast.Call)]
    modules = {target for value, target in made.items() if _MADE.match(value)}
    modules |= {ast.unparse(call.func) for call, _, _ in calls}  # a tensor is not called
    frozen = {owner for call, owner, _ in calls if "requires_grad_(False" in ast.unparse(call)}
    found = []
    for call, owner, method in calls:
        code, given = ast.unparse(call), {one.arg: ast.unparse(one.value) for one in call.keywords}
        low = not halves.isdisjoint([*map(ast.unparse, call.args), *given.values()])
        if method in ("half", "bfloat16") or (method in ("to", "type") and low):
            weights = owner in modules or _MADE.match(owner) is not None
        elif _LOADED.match(code) and given.get("dtype", given.get("torch_dtype", "'auto'")) == "'auto'":
            # From 5 on the default is the checkpoint's format.
            installed = metadata.distributions(name="transformers")
            weights = next((int(one.version.split(".")[0]) for one in installed), 5) >= 5
        else:
            weights = low and method in ("set_default_dtype", "from_pretrained", "from_config")
        weights &= "mezzo.optim" not in text and "masters=" not in text
        if weights and frozen.isdisjoint([owner, code, made.get(code)]):
            found.append((call.lineno, WEIGHTS, code))
        if _MIXES.match(code) or any(_SETTING.match(f"{key}={value}") for key, value in given.items()):
            found.append((call.lineno, MIXED, code))
    return sorted(found)
