"""`mezzo.explain`: run a model's forward once under a precision and say, op by op, what happened and why."""

from __future__ import annotations

import difflib
import json
import random
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from mezzo.core.errors import UnsupportedPrecisionError, UsageError
from mezzo.core.policy import PRESETS, Policy
from mezzo.core.policy import policy as policy_of
from mezzo.core.records import OpFormats
from mezzo.pytorch.autocast.context import autocast
from mezzo.pytorch.autocast.modules import apply_module_overrides, described, with_heads
from mezzo.pytorch.autocast.plan import plan
from mezzo.pytorch.observe.formats import MODULE_MARK, OpObserver
from mezzo.pytorch.unseen import unseen
from mezzo.pytorch.weights.lowering import stored

__all__ = ["Explanation", "explain"]

_WIDTH = 110
_NARROWEST = 60


@dataclass(frozen=True)
class Explanation:
    """What `explain` found. Printed, it is a table that fits the terminal; `departed` come first.

    Args:
        precision: the policy that was in force, with ``auto`` resolved.
        device_type: the kind of device on which it ran.
        ops: a row for each op, formats and place in the model, in the order of the first call.
        notes: what else the reader should know, a sentence each.
    """

    precision: str
    device_type: str
    ops: list[OpFormats]
    notes: list[str]

    @property
    def departed(self) -> list[OpFormats]:
        """The rows whose observed formats are not those planned."""
        return [row for row in self.ops if not row.as_planned]

    def to_json(self) -> str:
        """The explanation as one JSON object: ``precision``, ``device_type``, ``departed``, ``notes``,
        ``ops``."""
        rows = [{**asdict(row), "as_planned": row.as_planned} for row in self.ops]
        return json.dumps(
            {
                "precision": self.precision,
                "device_type": self.device_type,
                "departed": len(self.departed),
                "notes": self.notes,
                "ops": rows,
            },
            indent=2,
        )

    def __str__(self) -> str:
        terminal = sys.stdout is not None and sys.stdout.isatty()
        return self.as_text(shutil.get_terminal_size().columns if terminal else _WIDTH)

    def as_text(self, width: int = _WIDTH) -> str:
        """The table, no line longer than ``width`` columns (at least 60)."""
        width = max(width, _NARROWEST)
        lines = textwrap.wrap(self._headline(), width)
        for row in self.departed:
            text = f"! {row.op}{_at(row)}: planned {row.planned}, observed {row.observed}. {row.reason}."
            lines += textwrap.wrap(text, width, subsequent_indent="  ")
        for note in self.notes:
            lines += textwrap.wrap(f"* {note}", width, subsequent_indent="  ")
        return "\n".join([*lines, "", *_table(self.ops, width), "", *_reasons(self.ops, width)])

    def _headline(self) -> str:
        kinds = len({row.op for row in self.ops})
        verdict = "all as planned"
        if self.departed:
            verdict = f"{len(self.departed)} NOT AS PLANNED"
        return f"{self.precision} on {self.device_type}: {kinds} ops ran in the forward pass, {verdict}."


def explain(
    model: torch.nn.Module, *inputs: Any, precision: str | Policy = "auto", **kwargs: Any
) -> Explanation:
    """What each op of a model's forward pass does under a precision: rule, formats planned and seen,
    casts, why.

    It runs ``with mezzo.autocast(precision): model(*inputs, **kwargs)`` once, in the model's present mode
    (``train`` or ``eval``) and with gradients as they are switched now, watches, and puts back what the run
    changed: buffers (BatchNorm's running statistics) and the random state of torch, Python and NumPy.
    Parameters and their ``.grad`` are as before afterwards; where the policy stores them in 16 bits, so they are
    while the model runs. The model's output is thrown away.

    Args:
        model: any module; its first tensor, or else the first among the inputs, says on which kind of device.
        inputs: what the model is called with.
        precision: as for `mezzo.autocast`.
        kwargs: keyword arguments of the model.

    Raises:
        UsageError: ``model`` is no module; see `mezzo.policy` for the precision.
        UnknownNameError: a precision, op or module pattern that does not exist, with the nearest that does.
        UnsupportedPrecisionError: another execution trace is being recorded in this process.
        Whatever the model itself raises.

    >>> import torch
    >>> result = explain(torch.nn.Linear(4, 2), torch.ones(1, 4), precision="bf16")
    >>> [(row.op, row.observed) for row in result.ops]
    [('linear', 'bf16 -> bf16')]
    """
    _check_model(model)
    device_type = _device_type(model, inputs, kwargs)
    region = autocast(precision, device_type)
    policy = with_heads(region.policy or policy_of("fp32"), model)
    notes = list(policy.notes)
    if isinstance(precision, (str, Policy)) and policy_of(precision).compute == "auto":
        notes.append(f"auto is {policy.compute} here; mezzo.MixedPrecision times it against fp32 first.")
    compiled = _compiled(model)
    if compiled:
        notes.append(
            f"{compiled} is compiled: formats not observed inside it. Explain the model before compiling."
        )
    notes += described(policy, model)
    observer = OpObserver(policy, device_type, whole=True)
    with ExitStack() as stack:
        stack.enter_context(_restored(model))
        if not compiled:
            notes += stack.enter_context(stored(model, policy))
        if policy.modules:
            stack.enter_context(apply_module_overrides(model, policy, device_type))
        if not compiled:
            stack.enter_context(_marked(model))
        stack.enter_context(region)
        stack.enter_context(observer)
        model(*inputs, **kwargs)
    rows = observer.table()
    if observer.note:
        raise UnsupportedPrecisionError(f"explain: {observer.note}. End that one, then explain.")
    return Explanation(str(policy), device_type, _by_place(rows), notes + _kernels(rows, policy, device_type))


def _check_model(model: object) -> None:
    if isinstance(model, torch.nn.Module):
        return
    received = type(model).__name__
    mend = "Pass the model first, then its inputs: mezzo.explain(model, x, precision='bf16')."
    if isinstance(model, str) and difflib.get_close_matches(model, PRESETS, n=1):
        mend = f"The precision goes by name: mezzo.explain(model, x, precision={model!r})."
    elif isinstance(model, type) and issubclass(model, torch.nn.Module):
        received, mend = f"the class {model.__name__}", f"Make one first: {model.__name__}(...)."
    raise UsageError(f"mezzo.explain: model must be a torch.nn.Module, received {received}. {mend}")


def _device_type(model: torch.nn.Module, inputs: Sequence[Any], kwargs: dict[str, Any]) -> str:
    tensors = [*model.parameters(), *model.buffers(), *inputs, *kwargs.values()]
    return next((str(t.device.type) for t in tensors if isinstance(t, torch.Tensor)), "cpu")


def _compiled(model: torch.nn.Module) -> str:
    """The path of the first compiled module; an empty string if there is none."""
    for path, module in model.named_modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            return path or "the model"
    return ""


@contextmanager
def _restored(model: torch.nn.Module) -> Iterator[None]:
    """Put back what a forward pass changes: the buffers' values (and the buffers), the random states."""
    owned = [(module, dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=_gpus(model)):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        for module, buffers in owned:
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad(), unseen(buffer for buffer, _ in values):
            for buffer, value in values:
                buffer.copy_(value)


def _gpus(model: torch.nn.Module) -> list[int]:
    found = {t.device.index or 0 for t in model.parameters() if t.device.type == "cuda"}
    return sorted(found)


@contextmanager
def _marked(model: torch.nn.Module) -> Iterator[None]:
    """Mark in the trace which module runs."""
    open_marks: list[Any] = []
    handles = []

    def begin(path: str) -> Any:
        def hook(*_: Any) -> None:
            open_marks.append(torch.autograd.profiler.record_function(MODULE_MARK + path))
            open_marks[-1].__enter__()

        return hook

    def end(*_: Any) -> None:
        open_marks.pop().__exit__(None, None, None)

    try:
        for path, module in model.named_modules():
            if path and not isinstance(module, torch.jit.ScriptModule):
                handles.append(module.register_forward_pre_hook(begin(path), prepend=True))
                handles.append(module.register_forward_hook(end, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        while open_marks:
            end()


def _by_place(rows: list[OpFormats]) -> list[OpFormats]:
    """Rows of repeated blocks in one: ``blocks.0.attn`` and ``blocks.1.attn`` are ``blocks.*.attn``."""
    merged: dict[OpFormats, OpFormats] = {}
    for row in rows:
        place = re.sub(r"([^\d.][^.]*)\.\d+(?=\.|$)", r"\1.*", row.module)
        key = replace(row, module=place, calls=0, casts=0)
        before = merged.get(key, key)
        merged[key] = replace(before, calls=before.calls + row.calls, casts=before.casts + row.casts)
    return list(merged.values())


# How a plan says that an op is computed -> the sentence for the ops of which it says so.
_BY_KERNEL = {
    "native": "internal_fp32 by the native 16-bit kernel: {ops}.",
    "kernel": "computed in FP32 from sixteen bits by Mezzo's own kernel: {ops}.",
    "rounded": "internal_fp32 by the FP32 kernel between casts, rounded once, since nothing shows that the 16-bit "
    "kernel here accumulates in FP32: {ops}.",
    "emulated": "{compute} is not native to this device: computed in FP32 between casts: {ops}.",
}


def _kernels(rows: list[OpFormats], policy: Policy, device_type: str) -> list[str]:
    """Whose kernels computed what met 16 bits: the device's, Mezzo's own, or FP32's between casts."""
    if policy.activations == "fp32":
        return []
    plans = plan(policy, device_type)
    ran: dict[str, list[str]] = {kind: [] for kind in _BY_KERNEL}
    for op in dict.fromkeys(row.op for row in rows if policy.activations in row.observed):
        how = plans[op].how if op in plans else ""
        if how == "pytorch" and plans[op].rule == "internal_fp32":
            how = "native"
        kernel = plans[op].kernel if op in plans else None
        if kernel is not None and kernel.kind not in ("inside", "result"):
            continue
        if how in ran and (how != "native" or plans[op].rule == "internal_fp32"):
            ran[how].append(op)
    return [
        text.format(ops=", ".join(ran[kind]), compute=policy.activations)
        for kind, text in _BY_KERNEL.items()
        if ran[kind]
    ]


def _at(row: OpFormats) -> str:
    return f" in {row.module}" if row.module else ""


def _table(rows: list[OpFormats], width: int) -> list[str]:
    """The rows as aligned columns. Where they don't fit, the planned formats go (what departs is told above),
    then modules and ops are cut short."""
    columns = {
        "op": [row.op for row in rows],
        "module": [row.module for row in rows],
        "rule": [row.rule or "-" for row in rows],
        "planned": [row.planned or "-" for row in rows],
        "observed": [row.observed or "-" for row in rows],
        "calls": [str(row.calls) for row in rows],
        "casts": [str(row.casts) for row in rows],
        "": ["" if row.as_planned else "!" for row in rows],
    }
    for name in ("module", ""):
        if not any(columns[name]):
            del columns[name]
    widths = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}

    def over() -> int:
        return sum(widths.values()) + 2 * (len(widths) - 1) - width

    if over() > 0:
        del columns["planned"], widths["planned"]
    for name, least in (("module", 10), ("op", 14), ("observed", 12), ("rule", 8)):
        if over() > 0 and name in widths:
            widths[name] = max(min(least, widths[name]), widths[name] - over())

    def cell(name: str, text: str) -> str:
        size = widths[name]
        cut = text if len(text) <= size else text[: size - 1] + "…"
        return cut.rjust(size) if name in ("calls", "casts") else cut.ljust(size)

    lines = ["  ".join(cell(name, name) for name in columns), "  ".join("-" * widths[n] for n in columns)]
    lines += ["  ".join(cell(n, cells[i]) for n, cells in columns.items()) for i in range(len(rows))]
    return [line.rstrip() for line in lines]


def _reasons(rows: list[OpFormats], width: int) -> list[str]:
    """Why, once a reason: the ops that share it, then the sentence."""
    ops: dict[str, list[str]] = {}
    for row in rows:
        names = ops.setdefault(row.reason, [])
        if row.op not in names:
            names.append(row.op)
    lines = []
    for reason, names in ops.items():
        lines += textwrap.wrap(f"{', '.join(names)}: {reason}", width, subsequent_indent="    ")
    return lines
