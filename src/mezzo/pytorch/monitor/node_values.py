"""What a node of autograd's graph still knows of its operation: what it saved, its result, its slope.

Only while the graph has not been freed. Everything here answers None where a node doesn't tell.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mezzo.core.finding import TensorFacts
from mezzo.pytorch.monitor import op_names
from mezzo.pytorch.monitor.tensor_facts import facts, finite

_FORWARD = {"nll_loss": "nll_loss_forward", "nll_loss2d": "nll_loss2d_forward"}
_RESULTS = ("_saved_result", "_saved_output", "_saved_result0")


def saved(node: Any) -> list[TensorFacts]:
    """Facts of the floating tensors that a node saved in forward, at most four."""
    return [facts(value, f"saved {name}") for name, value in _saved_tensors(node).items()][:4]


def _saved_tensors(node: Any) -> dict[str, Tensor]:
    kept: dict[str, Tensor] = {}
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                value = getattr(node, name)
            except Exception:  # freed, changed in place, or a checkpoint's that is gone
                continue
            if isinstance(value, Tensor) and value.is_floating_point():
                kept[name.removeprefix("_saved_")] = value
    return kept


def result(node: Any) -> Tensor | None:
    """What the operation returned."""
    try:
        for name in _RESULTS:
            value = getattr(node, name, None)
            if isinstance(value, Tensor):
                return value
        return _computed(node, wide=False)
    except Exception:  # not an operation that can be repeated from what it saved
        return None


def has_pole(node: Any) -> bool | None:
    """Whether the operation's slope isn't finite at what went in, even in FP64; None if it can't be computed."""
    try:
        with torch.enable_grad():
            value = _computed(node, wide=True)
    except Exception:
        return None
    if value is None or value.grad_fn is None:
        return None
    behind: list[Any] = [following for following, _ in value.grad_fn.next_functions]
    leaves = [node.variable for node in behind if hasattr(node, "variable")]
    slopes = torch.autograd.grad(value, leaves, torch.ones_like(value))
    return not all(finite(slope) for slope in slopes)


def _computed(node: Any, *, wide: bool) -> Tensor | None:
    """The operation once more, from what was saved; in FP64 on fresh leaves if `wide`."""
    name = op_names.of_node(node)
    packet = getattr(torch.ops.aten, _FORWARD.get(name, name), None)
    if packet is None:
        return None
    for variant in packet.overloads():
        overload = getattr(packet, variant)
        arguments: dict[str, Any] = {}
        for argument in overload._schema.arguments:
            if hasattr(node, f"_saved_{argument.name}"):
                arguments[argument.name] = getattr(node, f"_saved_{argument.name}")
            elif not argument.has_default_value():
                break
        else:
            given = [value for value in arguments.values() if isinstance(value, Tensor)]
            if "out" in arguments or not given:
                continue
            if wide:
                arguments = {name: _leaf(value) for name, value in arguments.items()}
            with torch.autocast(given[0].device.type, enabled=False):
                value = overload(**{name: v if wide else _detached(v) for name, v in arguments.items()})
            value = value[0] if isinstance(value, tuple) else value
            return value if isinstance(value, Tensor) else None
    return None


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_()
    return value


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def cause_of_slope(
    node: Any, op: str, kept: list[TensorFacts], outputs: list[TensorFacts], zeros: bool
) -> str:
    """``invalid`` if an operation has no finite slope where it was, ``overflow`` if it is one beyond the format.

    Args:
        node: the operation's, which made gradients that aren't finite from ones that are.
        op: its name.
        kept: what it saved.
        outputs: the gradients that it made.
        zeros: whether there was a 0 in what went in or came out, for a node that doesn't say what it saved.
    """
    if op == op_names.HOOK:
        return "invalid"
    if op in op_names.POLES:
        pole = has_pole(node)
        if pole is not None:
            return "invalid" if pole else "overflow"
        blamed = [one for one in kept if op != "div" or one.name != "saved self"]
        return "invalid" if any(one.zeros for one in blamed) or (not kept and zeros) else "overflow"
    # Inside of an operation of many steps NaN comes of an overflow: inf - inf.
    if op in op_names.COMPOSED:
        return "overflow"
    return "invalid" if any(one.nans for one in outputs) else "overflow"
