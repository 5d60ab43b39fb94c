"""A model shown with its FP32 masters, to somebody who averages its weights.

An average over thousands of steps moves by less than a 16-bit weight can show, and PyTorch's averages want one
format on both sides. So what follows the model is shown what an FP32 model would be: other `Parameter` objects
in the modules' tables, for as long as it looks. The model's own are not touched, nor what hangs on them (hooks, DDP's
buckets).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from mezzo.pytorch.weights.lowering import LOWERED
from mezzo.pytorch.weights.master_state import master_state_dict


@contextmanager
def showing_masters(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """The model with FP32 masters in place of its 16-bit weights, until the block ends.

    Costs 4 bytes a 16-bit parameter for that time. Without 16-bit weights nothing happens.

    Args:
        model: any.
        optimizers: those that hold the masters; a weight of none of them is shown in FP32 as it is.
    """
    low = {id(p): name for name, p in model.named_parameters() if p.dtype in LOWERED}
    if not low:
        yield
        return
    state = master_state_dict(model, optimizers)
    shown = {key: nn.Parameter(state[name], requires_grad=False) for key, name in low.items()}
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in model.modules():
            for name, param in module._parameters.items():
                if param is not None and id(param) in shown:
                    module._parameters[name] = shown[id(param)]
                    replaced.append((module, name, param))
        yield
    finally:
        for module, name, param in replaced:
            module._parameters[name] = param
