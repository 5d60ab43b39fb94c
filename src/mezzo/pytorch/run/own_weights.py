"""16-bit weights that the script made, trained without FP32 masters: what they lose, measured; and `--masters`.

A weight w in bf16 moves only if its update is at least half an ulp of w, which is |w| / 256 to |w| / 512. Smaller
updates are lost at each step, however many there are. Masters keep them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mezzo.core.errors import UsageError
from mezzo.core.records import SWITCHED_OFF
from mezzo.pytorch.dtypes import SIXTEEN_BITS, name_of
from mezzo.pytorch.kernels.not_traced import not_traced
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.optim.with_masters import WithMasters, put_masters
from mezzo.pytorch.run.weights import SHARDED

if TYPE_CHECKING:
    from mezzo.pytorch.run.session import Session

STEPS = 5  # of each optimizer are measured
_SAMPLE = 65_536  # elements of each weight


def lowered(optimizer: Any) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """An optimizer's 16-bit weights that no master goes with, each with its group."""
    if not isinstance(optimizer, (FusedOptimizer, WithMasters)):
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.dtype in SIXTEEN_BITS and param.requires_grad:
                    yield group, param


def trains(module: nn.Module) -> bool:
    """Whether a module has parameters to train: `--own off` lets a frozen one keep its format."""
    return any(p.requires_grad and p.is_floating_point() for p in module.parameters())


def widen(session: Session, module: nn.Module, name: str) -> None:
    """Make 16-bit parameters and buffers FP32, in place, where `--own off` found no setting to switch off."""
    low = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.dtype in SIXTEEN_BITS]
    if low and any(kind.__name__ in SHARDED for part in module.modules() for kind in type(part).__mro__):
        session.fatal = error = UsageError(
            f"--own off: {name} has 16-bit parameters and is wrapped for data parallelism. Make its parameters FP32 "
            "before it is wrapped."
        )
        raise error
    for tensor in low:
        session.journal.note(f"{SWITCHED_OFF}{name} in {str(tensor.dtype).removeprefix('torch.')}")
        tensor.data = tensor.detach().float()
        tensor.grad = None if tensor.grad is None else tensor.grad.float()


class LostUpdates:
    """Measures the share of updates that leave their 16-bit weight as it was, in an optimizer's first steps."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._left: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._counts: dict[str, list[int]] = {}  # by optimizer and format: updates lost, all, steps

    @not_traced
    def wants(self, optimizer: Any) -> bool:
        """Whether the optimizer's next step is measured."""
        left = self._left.get(optimizer)
        if left is None:
            left = self._left[optimizer] = STEPS if any(True for _ in lowered(optimizer)) else 0
        return left > 0

    @contextmanager
    def measured(self, optimizer: Any) -> Iterator[None]:
        """Measure the step inside. Not counted: a learning rate of 0, a gradient of 0, a step that is not taken."""
        before = [
            (param, _sample(param).clone(), _sample(param.grad) != 0)
            for group, param in lowered(optimizer)
            if group.get("lr") != 0 and param.grad is not None and type(param.detach()) is Tensor
            and param.grad.layout is torch.strided
        ]  # fmt: skip
        skipped = getattr(optimizer, "found_inf", None)
        yield
        if not before or (skipped is not None and bool(skipped)):
            return
        self._left[optimizer] -= 1
        what = f"{type(optimizer).__name__} trains {name_of(before[0][0].dtype)} weights"
        counts = self._counts.setdefault(what, [0, 0, 0])
        for param, old, moves in before:
            counts[0] += int(((_sample(param) == old) & moves).sum())
            counts[1] += int(moves.sum())
        counts[2] += 1

    def finish(self) -> None:
        """The script is over: note what was lost, and how to keep it."""
        for what, (lost, updates, steps) in self._counts.items():
            if updates and lost:
                self._session.journal.note(
                    f"{what} without FP32 masters: in {steps} early steps {100 * lost / updates:.0f} % of the updates "
                    "were smaller than half a unit in the last place of their weight, and were lost"
                )
                self._session.journal.note(f"to keep them: {self._session.with_masters()}")


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // _SAMPLE)]


class Masters:
    """`--masters`: FP32 masters under the script's own optimizers, from their first step or `load_state_dict` on."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._counts: Counter[str] = Counter()  # weights with masters, by kind and optimizer

    @not_traced
    def supply(self, optimizer: Any) -> bool:
        """Give the optimizer's 16-bit weights masters, which changes its class; False if it has none."""
        weights = [param for _, param in lowered(optimizer)] if self._session.request.masters else []
        if weights:
            how = put_masters(optimizer, self._session.request.masters)
            self._counts[f"{how} masters under {type(optimizer).__name__}"] += len(weights)
        return bool(weights)

    def load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The `Optimizer.load_state_dict` of a run: a state with masters needs an optimizer that has them."""

        def load_state_dict(optimizer: Any, state_dict: Any) -> Any:
            if self.supply(optimizer):
                return optimizer.load_state_dict(state_dict)
            return original(optimizer, state_dict)

        load_state_dict._torchdynamo_disable = True  # type: ignore[attr-defined]
        return load_state_dict

    def finish(self) -> None:
        """The script is over: note what got masters."""
        if kind := self._session.request.masters:
            for what, weights in self._counts.items():
                self._session.journal.note(f"{what}: {weights} weights")
            if not self._counts:
                self._session.journal.note(
                    f"--masters {kind} changed nothing: no optimizer of the script has 16-bit weights without masters"
                )
