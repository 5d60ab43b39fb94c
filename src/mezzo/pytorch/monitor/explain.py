"""`mezzo.explain`: run a model's forward pass once under a precision and report, op by op, formats and reasons."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from mezzo.core.commands import columns, folded
from mezzo.core.errors import UnsupportedPrecisionError, UsageError
from mezzo.core.notebook import html_table
from mezzo.core.policy import Policy
from mezzo.core.policy import policy as policy_of
from mezzo.core.records import OpFormats
from mezzo.pytorch.autocast.context import context_of
from mezzo.pytorch.autocast.modules import apply_module_overrides, described, with_heads
from mezzo.pytorch.autocast.plan import plan
from mezzo.pytorch.module_paths import around_calls, opaque_part, walk
from mezzo.pytorch.monitor.formats import MODULE_MARK, OpObserver, summed
from mezzo.pytorch.monitor.replay import nothing_left
from mezzo.pytorch.weights.stored_parameters import stored

_WIDTH = 110


@dataclass(frozen=True, repr=False)
class Explanation:
    """What `explain` found. Printed, it is a table that fits the terminal; `departed` come first.

    Args:
        precision: the policy, with ``auto`` resolved.
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
        """The explanation as one JSON object: ``precision``, ``device_type``, ``departed``, ``notes``, ``ops``."""
        rows = [{**asdict(row), "as_planned": row.as_planned} for row in self.ops]
        return json.dumps({**asdict(self), "departed": len(self.departed), "ops": rows}, indent=2)

    def __str__(self) -> str:
        return self.as_text(columns(sys.stdout) or _WIDTH)

    def __repr__(self) -> str:
        return f"<Explanation: {self.as_text(1000).splitlines()[0]} print() shows them.>"

    def _repr_html_(self) -> str:
        names = ("op", "module", "rule", "planned", "observed", "calls", "casts", "reason")
        rows = sorted(self.ops, key=lambda row: row.as_planned)  # departures first
        cells = [[getattr(row, name) or "" for name in names] for row in rows]
        verdict = f"{len(self.departed)} not as planned" if self.departed else "all as planned"
        title = f"{self.precision} on {self.device_type}: {verdict}. {' '.join(self.notes)}"
        return html_table(title.rstrip(), cells, names)

    def as_text(self, width: int = _WIDTH) -> str:
        """The table, no line longer than ``width`` columns (at least 60)."""
        width = max(width, 60)
        count = len({row.op for row in self.ops})
        kinds = "1 kind of op" if count == 1 else f"{count} kinds of ops"
        verdict = f"{len(self.departed)} NOT AS PLANNED" if self.departed else "all as planned"
        lines = [f"{self.precision} on {self.device_type}: {kinds} ran in the forward pass, {verdict}."]
        for row in self.departed:
            place = f" in {row.module}" if row.module else ""
            lines.append(f"! {row.op}{place}: planned {row.planned}, observed {row.observed}. {row.reason}.")
        lines += [f"* {note}" for note in self.notes]
        reasons: dict[str, list[str]] = {}
        for row in self.ops:
            one = all(other.reason == row.reason for other in self.ops if other.op == row.op)
            named = row.op if one else f"{row.op} in {row.module or 'the model'}"
            reasons.setdefault(row.reason, []).append(named)
        legend = "casts: conversions to another format, of inputs or outputs, in all calls of the row"
        lines += ["", *_table(self.ops, width), legend, ""]
        lines += [f"{', '.join(dict.fromkeys(ops))}: {reason}" for reason, ops in reasons.items()]
        return folded("\n".join(lines), width)


def explain(
    model: torch.nn.Module, *inputs: Any, precision: str | Policy = "auto", **kwargs: Any
) -> Explanation:
    """What each op of a model's forward pass does under a precision: rule, formats planned and seen, casts, why.

    It runs ``with mezzo.autocast(precision): model(*inputs, **kwargs)`` once, in the model's present mode (``train`` or
    ``eval``) and with gradients as they are switched now, and puts back what the call changed: buffers (BatchNorm's
    running statistics), attributes of modules, and the random state of torch, Python and NumPy. Parameters and their
    ``.grad`` are as before afterwards; where the policy stores parameters in 16 bits, they are lowered for the call.
    The model's output is thrown away. Compiled parts run as they were written.

    Args:
        model: any module; its first tensor, or else the first among the inputs, gives the kind of device.
        inputs: the model's arguments.
        precision: as for `mezzo.autocast`.
        kwargs: the model's keyword arguments.

    Raises:
        UsageError: ``model`` is not a module, or its inputs are missing; see `mezzo.policy` for the precision.
        UnknownNameError: a precision, op or module pattern that does not exist, with the nearest that does.
        UnsupportedPrecisionError: another execution trace is being recorded in this process.
        Whatever the model itself raises.

    >>> import torch
    >>> result = explain(torch.nn.Linear(4, 2), torch.ones(1, 4), precision="bf16")
    >>> [(row.op, row.observed) for row in result.ops]
    [('linear', 'bf16 -> bf16')]
    """
    _check_model(model, inputs or kwargs)
    tensors = [*model.parameters(), *model.buffers(), *inputs, *kwargs.values()]
    device_type = next((str(t.device.type) for t in tensors if isinstance(t, torch.Tensor)), "cpu")
    context = context_of(policy_of(precision).at(0), device_type)
    policy = with_heads(context.policy or policy_of("fp32"), model, strict=False)
    notes = list(policy.notes)
    if isinstance(precision, (str, Policy)) and policy_of(precision).compute == "auto":
        notes.append(f"auto selects {policy.compute} here. mezzo.MixedPrecision also times it against fp32.")
    compiled = opaque_part(model)
    if compiled:
        notes.append(f"{compiled} is compiled: these are the formats without compilation.")
    observer = OpObserver(policy, device_type, whole=True)
    with ExitStack() as stack:
        stack.enter_context(nothing_left(model))
        notes += stack.enter_context(stored(model, policy))
        if policy.modules:
            stack.enter_context(apply_module_overrides(model, policy, device_type))
        stack.enter_context(_marked(model))
        stack.enter_context(context)
        stack.enter_context(observer)
        model(*inputs, **kwargs)
        notes += described(policy, model)  # a lazy layer has its sizes now
    if observer.note:
        raise UnsupportedPrecisionError(f"mezzo.explain: {observer.note}. Stop it before the call.")
    rows = observer.table()
    # Repeated blocks have one row: ``blocks.0.attn`` and ``blocks.1.attn`` are ``blocks.*.attn``.
    number = re.compile(r"([^\d.][^.]*)\.\d+(?=\.|$)")
    ops = summed(replace(row, module=number.sub(r"\1.*", row.module)) for row in rows)
    return Explanation(str(policy), device_type, ops, notes + _kernels(rows, policy, device_type))


def _check_model(model: object, given: object) -> None:
    if not isinstance(model, torch.nn.Module):
        received = f"the class {model.__name__}" if isinstance(model, type) else repr(model)
        raise UsageError(
            f"mezzo.explain: model must be a torch.nn.Module, received {received}. Pass the model first, then its "
            "inputs, and the precision by name: mezzo.explain(model, x, precision='bf16')."
        )
    takes = () if given else inspect.signature(model.forward).parameters.values()
    if any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in takes):
        raise UsageError("mezzo.explain: no inputs are given. Pass the model's: mezzo.explain(model, x).")


@contextmanager
def _marked(model: torch.nn.Module) -> Iterator[None]:
    """Mark in the trace which module runs."""
    inside = ((path, module) for path, module in walk(model, inside=True) if path)
    paths = {module: path for path, module in inside if not isinstance(module, torch.jit.ScriptModule)}
    open_marks: list[Any] = []

    def begin(module: torch.nn.Module, *_: Any) -> None:
        open_marks.append(torch.autograd.profiler.record_function(MODULE_MARK + paths[module]))
        open_marks[-1].__enter__()

    def end(*_: Any) -> None:
        open_marks.pop().__exit__(None, None, None)

    with around_calls(paths, begin, end, prepend=True):
        yield


# How an op is computed, by its plan -> the sentence for such ops.
_BY_KERNEL = {
    "native": "internal_fp32, by the device's 16-bit kernel: {ops}.",
    "kernel": "read in 16 bits and computed in FP32, by Mezzo's kernel: {ops}.",
    "rounded": "internal_fp32, by the FP32 kernel between casts (the 16-bit kernel may not accumulate in FP32): {ops}.",
    "emulated": "{compute} is emulated on this device, by the FP32 kernel between casts: {ops}.",
}


def _kernels(rows: list[OpFormats], policy: Policy, device_type: str) -> list[str]:
    """Which kernels computed the ops that met 16 bits: the device's, Mezzo's own, or FP32's between casts."""
    if policy.activations == "fp32":
        return []
    plans = plan(policy, device_type)
    ran: dict[str, list[str]] = {}
    for op in dict.fromkeys(row.op for row in rows if policy.activations in row.observed and row.op in plans):
        how, kernel = plans[op].how, plans[op].kernel
        if how in ("pytorch", "native"):
            how = "native" if plans[op].rule == "internal_fp32" else ""
        if how in _BY_KERNEL and (kernel is None or kernel.kind in ("inside", "result")):
            ran.setdefault(how, []).append(op)
    return [
        sentence.format(ops=", ".join(ran[how]), compute=policy.activations)
        for how, sentence in _BY_KERNEL.items()
        if how in ran
    ]


def _table(rows: list[OpFormats], width: int) -> list[str]:
    """The rows as aligned columns; where they don't fit, without the planned formats, and then cut short."""
    names = ["op", "module", "rule", "planned", "observed", "calls", "casts"]
    columns = {name: [str(getattr(row, name)) or "-" for row in rows] for name in names}
    columns["module"] = [row.module for row in rows]
    columns[""] = ["" if row.as_planned else "!" for row in rows]
    widths = {name: max(map(len, (name, *texts))) for name, texts in columns.items() if any(texts)}
    excess = sum(widths.values()) + 2 * len(widths) - 2 - width
    if excess > 0:
        excess -= widths.pop("planned") + 2
    for name, least in (("module", 10), ("op", 14), ("observed", 12), ("rule", 8)):
        cut = min(excess, widths.get(name, 0) - least)
        if cut > 0:
            widths[name], excess = widths[name] - cut, excess - cut
    for name, size in widths.items():
        cells = [name, *columns[name]]
        columns[name] = [(one if len(one) <= size else f"{one[: size - 1]}…").ljust(size) for one in cells]
    return ["  ".join(line).rstrip() for line in zip(*(columns[name] for name in widths))]
