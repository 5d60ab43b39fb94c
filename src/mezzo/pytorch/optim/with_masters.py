"""FP32 masters under any optimizer: the user's own, or one of PyTorch's that Mezzo has no fused form of.

While the optimizer's `step` runs, its parameter groups list FP32 parameters, the masters, with FP32 gradients. Before
and after, the same groups list the model's 16-bit weights. So hyper-parameters, schedulers, `zero_grad` and
`add_param_group` work without copies: the wrapper and the inner optimizer share one list of groups and one `state`, in
which a weight's master is the entry ``"master"``.

Cost: an FP32 master per 16-bit weight, and an FP32 gradient during a step. The fused optimizers of `mezzo.optim` need
neither.
"""

from __future__ import annotations

import functools
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels.optimizer_step.reference import decode_master, encode_master
from mezzo.pytorch.optim import checks
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.optim.state_dicts import MASTER, masters_in, without_master
from mezzo.pytorch.weights import lowering


def with_masters(optimizer: Optimizer) -> WithMasters:
    """Put FP32 masters under an optimizer's 16-bit weights; FP32 parameters are passed through.

    Naive code, for each weight::

        master.grad = weight.grad.float()
        optimizer_over_masters.step()
        weight.copy_(half_away16(master))       # bf16; fp16: ties to even

    The result steps, saves and schedules as the optimizer did, and the original object stays usable: its `step` and
    `load_state_dict` go through the masters, and schedulers over it keep working. An element of a weight that was
    edited since its last step (pruned, clamped, loaded) replaces its master. Existing state is kept, in FP32.

    Args:
        optimizer: any instance of `torch.optim.Optimizer`, also with closures (LBFGS) and sparse gradients. One that
            keeps its own list of parameters besides `param_groups` does not see the masters.

    Raises:
        UsageError: not an optimizer; one that has masters; ``differentiable=True``; a weight whose master another
            optimizer holds.
    """
    return WithMasters(optimizer)


class WithMasters(Optimizer):
    """The result of `with_masters`.

    Follows the contract of PyTorch's fused optimizers with a `GradScaler`: gradients are divided by the scale in FP32
    as they are copied, and a step whose `found_inf` is not 0 changes nothing, at the cost of waiting for the device.

    Args:
        inner: the optimizer that updates the masters.
    """

    _step_supports_amp_scaling = True

    def __init__(self, inner: Optimizer) -> None:
        _refuse_unfit(inner)
        self.inner = inner
        for param in self._lowered():
            checks.claim(self, param)
        self._attach(inner)
        for param in self._lowered():
            entry = inner.state.get(param)
            if entry:
                inner.state[param] = {key: _widened(value) for key, value in entry.items()}
            self._ensure_master(param)

    def _attach(self, inner: Optimizer) -> None:
        self.inner = inner
        self._masters: dict[Tensor, nn.Parameter] = {}
        self._is_swapped = False
        super().__setstate__({})  # hooks and profiling names, as the base class sets them up
        for name in ("step", "load_state_dict"):
            _forward(inner, name, self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups, which list the model's parameters."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state by parameter of the model, with ``"master"`` where there is one."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        return self.inner.defaults

    def __getstate__(self) -> dict[str, Any]:
        # Masters are separate, because the inner optimizer may read its entries as it is unpickled.
        inner = self.inner.__getstate__()
        masters = {p: entry[MASTER] for p, entry in self.state.items() if MASTER in entry}
        entries = {p: without_master(entry) for p, entry in self.state.items()}
        held = defaultdict(dict, {p: entry for p, entry in entries.items() if entry != {}})
        return {"class": type(self.inner), "inner": {**inner, "state": held}, "masters": masters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        inner = state["class"].__new__(state["class"])
        inner.__setstate__(state["inner"])
        self._attach(inner)
        for param, master in state["masters"].items():
            checks.claim(self, param)
            inner.state[param][MASTER] = master

    def __repr__(self) -> str:
        return f"with_masters({self.inner!r})"

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """One step of the inner optimizer on the masters, then update the weights.

        Args:
            closure: called by the inner optimizer any number of times; each time the weights equal the masters.
            kwargs: for the inner optimizer's `step`.

        Returns:
            The inner optimizer's result; None for a skipped step.
        """
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return None
        arguments: list[Any] = []
        if closure is not None:

            def evaluate() -> Any:
                self._end()
                result = closure()
                self._begin(None)
                return result

            arguments.append(evaluate)
        self._begin(None if closure else getattr(self, "grad_scale", None))
        try:
            return self.inner.step(*arguments, **kwargs)
        finally:
            if self._is_swapped:
                self._end()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its 16-bit weights get masters."""
        self.inner.add_param_group(param_group)
        for param in self._lowered():
            self._ensure_master(param)

    def master(self, param: Tensor) -> Tensor:
        """A copy of a parameter's FP32 master; of an FP32 parameter itself. A UsageError for another's parameter."""
        self._check_own(param)
        if param.dtype not in lowering.LOWERED:
            return param.detach().clone()
        return decode_master("fp32", param.detach(), self._ensure_master(param))

    @torch.no_grad()
    def set_master(self, param: Tensor, value: Tensor) -> None:
        """Set a parameter's master, and its weight, from an FP32 value; a UsageError for another shape or parameter."""
        self._check_own(param)
        if value.shape != param.shape:
            raise UsageError(
                f"set_master: the value is {tuple(value.shape)} and the parameter {tuple(param.shape)}"
            )
        if param.dtype in lowering.LOWERED:
            master = self._ensure_master(param)
            master.copy_(value)
            _write(master, param)
        else:
            param.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, with each 16-bit weight's FP32 ``"master"`` among its entries."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        for param in self._lowered():
            self._ensure_master(param)
        state: dict[str, Any] = self.inner.state_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state = post_hook(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of `state_dict`, or of the plain inner optimizer, which leaves the masters as they are.

        The weights are not changed: load the model's state too. A weight that differs from its rounded master counts as
        edited.

        Raises:
            UsageError: groups or masters that do not fit this optimizer's; nothing was changed.
        """
        state = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state = pre_hook(self, state) or state
        masters = masters_in(state, self.param_groups, self.state)
        entries = {key: without_master(entry) for key, entry in state["state"].items()}
        state["state"] = {key: entry for key, entry in entries.items() if entry != {}}
        self._swap_in()
        try:
            self.inner.load_state_dict(state)
        finally:
            self._swap_out()
        for param, master in masters.items():
            self._ensure_master(param).copy_(master)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def _lowered(self) -> list[Tensor]:
        return [param for param in self._parameters() if param.dtype in lowering.LOWERED]

    def _check_own(self, param: Tensor) -> None:
        if not any(param is one for one in self._parameters()):
            raise UsageError(f"this optimizer has no such parameter (of shape {tuple(param.shape)})")

    def _ensure_master(self, param: Tensor) -> Tensor:
        """A weight's master; created if it is missing."""
        entry = self.state.get(param, {})
        master: Tensor | None = entry.get(MASTER)
        if master is None:
            checks.claim(self, param)
            kept = lowering.take_master(param)
            master = param.detach().to(torch.float32) if kept is None else kept
        elif master.shape != param.shape:
            raise UsageError(
                f"a weight of {tuple(param.shape)} has a master of {tuple(master.shape)}: its `.data` was "
                "replaced by another shape. Make a new optimizer for it."
            )
        entry[MASTER] = master = master.to(param.device)
        self.state[param] = entry
        return master

    @torch.no_grad()
    def _begin(self, scale: Tensor | None) -> None:
        """Put the masters in the groups, updated from edited weights, and give them gradients."""
        for param in self._parameters():
            grad = param.grad
            if param.dtype not in lowering.LOWERED:
                if self.state.get(param):
                    self.state[param].pop(MASTER, None)  # the model was brought back to FP32
                if grad is not None and scale is not None:
                    grad.div_(scale.to(grad.device))
                continue
            tensor = self._ensure_master(param)
            for part, weight in lowering.pieces(tensor, param.detach()):
                part.copy_(decode_master("fp32", weight, part))
            if grad is not None:
                wide = grad.to(torch.float32)
                self._parameter(param).grad = wide if scale is None else wide / scale.to(grad.device)
        self._swap_in()

    @torch.no_grad()
    def _end(self) -> None:
        """Put the model's weights back in the groups, rounded from the masters."""
        self._swap_out()
        for param in self._lowered():
            self._parameter(param).grad = None
            _write(self.state[param][MASTER], param)

    def _parameter(self, param: Tensor) -> nn.Parameter:
        """The `Parameter` that replaces a weight during a step: the same one at each step."""
        master = self._masters.get(param)
        if master is None:
            master = self._masters[param] = nn.Parameter(self._ensure_master(param))
        return master

    def _swap_in(self) -> None:
        replaced: dict[Any, Any] = {}
        for param in self._lowered():
            master = replaced[param] = self._parameter(param)
            master.data = self._ensure_master(param)
            master.requires_grad_(param.requires_grad)
        for param in replaced:
            del self.state[param][MASTER]
            if not self.state[param]:
                del self.state[param]  # some optimizers ask whether a parameter has a state
        self._exchange(replaced)
        self._is_swapped = True

    def _swap_out(self) -> None:
        back = {master: param for param, master in self._masters.items()}
        listed = set(self._parameters())
        self._exchange(back)
        for master, param in back.items():
            if master in listed:
                self.state.setdefault(param, {})[MASTER] = master.detach()
        self._is_swapped = False

    def _exchange(self, other: dict[Any, Any]) -> None:
        """Replace parameters in the state and in the groups' own lists, which LBFGS and others refer to."""
        entries = list(self.state.items())
        self.state.clear()
        self.state.update((other.get(key, key), entry) for key, entry in entries)
        for group in self.param_groups:
            group["params"][:] = [other.get(param, param) for param in group["params"]]


def _refuse_unfit(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"with_masters takes a torch.optim.Optimizer, received {type(optimizer).__name__}.")
    has_masters = isinstance(optimizer, (WithMasters, FusedOptimizer))
    if has_masters or hasattr(optimizer.step, "_goes_through_masters"):
        raise UsageError(
            f"with_masters: this {type(optimizer).__name__} has masters already: use it as it is. (One of "
            "mezzo.optim takes masters='fp32' or 'split' when it is made.)"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UsageError(
            "with_masters can't pass gradients through a step: make the optimizer without differentiable=True."
        )


def _forward(inner: Optimizer, name: str, owner: WithMasters) -> None:
    """Redirect calls of the inner optimizer's method from outside to the owner's method."""
    own = getattr(inner, name)

    @functools.wraps(own)
    def through(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs) if owner._is_swapped else getattr(owner, name)(*args, **kwargs)

    through._goes_through_masters = owner  # type: ignore[attr-defined]
    # A method, since schedulers ask a step for its __func__.
    setattr(inner, name, types.MethodType(through, inner))


def _write(master: Tensor, weight: Tensor) -> None:
    for part, out in lowering.pieces(master, weight.detach()):
        out.copy_(encode_master("fp32", part, weight.dtype)[0])


def _widened(value: Any) -> Any:
    is_low = isinstance(value, Tensor) and value.dtype in lowering.LOWERED
    return value.to(torch.float32) if is_low else value
