"""FP32 masters under any optimizer: the user's own, or one of PyTorch's that Mezzo has no fused form of.

The optimizer itself is not rewritten. While its `step` runs, its parameter groups list FP32 parameters, the
masters, with FP32 gradients, and it does what it always did; before and after, the very same groups list the
model's 16-bit weights. So hyper-parameters, schedulers, `zero_grad` and `add_param_group` need no copying back
and forth: the wrapper and the optimizer inside share one list of groups and one `state`, in which a weight's
master is the entry ``"master"`` beside the optimizer's own.

What it costs: for each 16-bit weight an FP32 master between steps, and during a step an FP32 gradient. The
fused optimizers of `mezzo.optim` need neither copy; this is for all the others.
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
from mezzo.pytorch.optim.adopt import Adopted
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.optim.state_dicts import MASTER, masters_in, without_master
from mezzo.pytorch.weights import lowering


def with_masters(optimizer: Optimizer) -> WithMasters:
    """Put FP32 masters under an optimizer's 16-bit weights; FP32 parameters pass through untouched.

    Naive code, for each weight::

        master.grad = weight.grad.float()
        optimizer_over_masters.step()
        weight.copy_(half_away16(master))       # bf16; fp16: ties to even

    The result steps, saves and schedules as the optimizer did. The object that was handed over stays usable:
    its `step` and `load_state_dict` go through the masters too, and a scheduler made over it keeps working. A
    weight that was edited since its last step (pruned, clamped, loaded) has its master start from the weight,
    element by element. A state that the optimizer has already is kept, its 16-bit tensors in FP32.

    Args:
        optimizer: any instance of `torch.optim.Optimizer`, closures (LBFGS) and sparse gradients included.
            One that keeps a list of parameters apart from `param_groups` does not see the masters.

    Raises:
        UsageError: no optimizer; one that has masters already; ``differentiable=True``; a weight whose master
            another optimizer holds.
    """
    return WithMasters(optimizer)


class WithMasters(Optimizer):
    """What `with_masters` returns.

    It divides by a `GradScaler`'s scale in FP32 as gradients are copied, by the contract of PyTorch's fused
    optimizers, so that fp16 gradients need no unscaling in fp16; and a step whose `found_inf` is not 0 leaves
    everything as it was, at the cost of waiting for the device.

    Args:
        inner: the optimizer that moves the masters.
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

    # The groups and the state are the inner optimizer's own.

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
        # Apart from the inner optimizer's entries, which it may look through as it is unpickled.
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
        """One step of the inner optimizer on the masters; the weights follow.

        Args:
            closure: run by the inner optimizer as often as it likes; each time the weights show the masters.
            kwargs: for the inner optimizer's `step`.

        Returns:
            What the inner optimizer returned; None for a step that was skipped.
        """
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return None
        if closure is None:
            self._begin(getattr(self, "grad_scale", None))
            arguments: tuple[Any, ...] = ()
        else:
            self._begin(None)
            arguments = (self._evaluator(closure),)
        try:
            return self.inner.step(*arguments, **kwargs)
        finally:
            if self._is_swapped:
                self._end()

    def _evaluator(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            self._end()
            result = closure()
            self._begin(None)
            return result

        return evaluate

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as `torch.optim.Optimizer` does; its 16-bit weights get masters."""
        self.inner.add_param_group(param_group)
        for param in self._lowered():
            self._ensure_master(param)

    def master(self, param: Tensor) -> Tensor:
        """A parameter's FP32 master, as a copy; for an FP32 parameter its own value.

        Raises:
            UsageError: a parameter that this optimizer does not have.
        """
        self._own(param)
        if param.dtype not in lowering.LOWERED:
            return param.detach().clone()
        return decode_master("fp32", param.detach(), self._ensure_master(param))

    @torch.no_grad()
    def set_master(self, param: Tensor, value: Tensor) -> None:
        """Set a parameter's master, and its weight with it.

        Args:
            param: one of this optimizer's.
            value: FP32, of its shape.

        Raises:
            UsageError: another shape, or a parameter that this optimizer does not have.
        """
        self._own(param)
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
        """Go on from a state of `state_dict`, or from one of the plain inner optimizer.

        The weights are not touched: the model's own `load_state_dict` brings them, and a weight that is not
        what its master says counts as edited. A state without any master leaves the masters as they are.

        Raises:
            UsageError: groups or masters that do not fit this optimizer's; nothing was changed.
        """
        state = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state = pre_hook(self, state) or state
        masters = masters_in(state, self.param_groups, self.state)
        entries = {key: without_master(entry) for key, entry in state["state"].items()}
        # An empty entry would tell some optimizers that the parameter has a state.
        state["state"] = {key: entry for key, entry in entries.items() if entry != {}}
        inner = self.inner
        before = {p: dict(entry) if isinstance(entry, dict) else entry for p, entry in inner.state.items()}
        groups = [dict(group) for group in inner.param_groups]
        self._swap_in()
        try:
            inner.load_state_dict(state)
        except BaseException:
            self._swap_out()
            inner.state.clear()
            inner.state.update(before)
            for group, saved in zip(inner.param_groups, groups):
                group.clear()
                group.update(saved)
            raise
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

    def _own(self, param: Tensor) -> None:
        if not any(param is one for one in self._parameters()):
            raise UsageError(f"this optimizer has no such parameter (of shape {tuple(param.shape)})")

    def _ensure_master(self, param: Tensor) -> Tensor:
        """The tensor that is a weight's master, made where it is missing."""
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
        """Put the masters in the groups, brought up to date with the weights, and give them gradients."""
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
        """Put the model's weights back in the groups, as the masters say."""
        self._swap_out()
        for param in self._lowered():
            self._parameter(param).grad = None
            _write(self.state[param][MASTER], param)

    def _parameter(self, param: Tensor) -> nn.Parameter:
        """The `Parameter` that stands for a weight during a step: the same one at each step."""
        master = self._masters.get(param)
        if master is None:
            master = self._masters[param] = nn.Parameter(self._ensure_master(param))
        return master

    def _swap_in(self) -> None:
        state = self.state
        lowered = set(self._lowered())
        for param in lowered:
            master = self._parameter(param)
            master.data = self._ensure_master(param)
            master.requires_grad_(param.requires_grad)
        entries = list(state.items())
        state.clear()
        for key, entry in entries:
            if key not in lowered:
                state[key] = entry
            elif entry.keys() - {MASTER}:
                del entry[MASTER]
                state[self._masters[key]] = entry
        self._exchange({param: self._masters[param] for param in lowered})
        self._is_swapped = True

    def _swap_out(self) -> None:
        state = self.state
        back = {master: param for param, master in self._masters.items()}
        entries = list(state.items())
        listed = {p for group in self.param_groups for p in group["params"]}
        state.clear()
        for key, entry in entries:
            state[back.get(key, key)] = entry
        self._exchange(back)
        for master, param in back.items():
            if master in listed:
                entry = state.get(param)
                if entry is None:
                    entry = state[param] = {}
                entry[MASTER] = master.detach()
        self._is_swapped = False

    def _exchange(self, other: dict[Any, Any]) -> None:
        """Replace parameters in the groups' own lists, to which LBFGS and others hold."""
        for group in self.param_groups:
            group["params"][:] = [other.get(param, param) for param in group["params"]]


def _refuse_unfit(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"with_masters takes a torch.optim.Optimizer, received {type(optimizer).__name__}.")
    has_masters = isinstance(optimizer, (WithMasters, FusedOptimizer, Adopted))
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
    """Let a method of the inner optimizer, called from outside, do what the owner's does."""
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
