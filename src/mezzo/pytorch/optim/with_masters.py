"""FP32 masters under any optimizer, which stays the same object: its class becomes a subclass that has masters.

While the optimizer's own `step` runs, its groups list FP32 masters with FP32 gradients; before and after, the model's
16-bit weights. A weight's master is the entry ``"master"`` of its state. `mezzo.optim` needs less memory.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.core.errors import UsageError
from mezzo.pytorch.autocast.modules import to_fp32
from mezzo.pytorch.distributed import is_spread, local
from mezzo.pytorch.dtypes import SIXTEEN_BITS
from mezzo.pytorch.kernels.optimizer_step.reference import decode_master, encode_master
from mezzo.pytorch.optim import checks, state_dicts
from mezzo.pytorch.optim.adopt import adopt, empty, extend
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.optim.state_dicts import MASTER, masters_in, without_master
from mezzo.pytorch.step import parameters
from mezzo.pytorch.weights import shards
from mezzo.pytorch.weights.stored_parameters import give_back, take_master, write


def with_masters(optimizer: Any) -> WithMasters:
    """Put FP32 masters under an optimizer's 16-bit weights; FP32 parameters are passed through.

    Naive code, for each weight::

        master.grad = weight.grad.float()
        optimizer_over_masters.step()
        weight.copy_(half_away16(master))       # bf16; fp16: ties to even

    Steps, schedulers and state dicts work as before. If a weight was edited since the last step (pruned, clamped,
    loaded), the edited elements replace their masters. Existing state is kept, in FP32. Step hooks see the masters.

    Args:
        optimizer: any `torch.optim.Optimizer`, also with closures (LBFGS) and sparse gradients, whose only list of
            parameters is `param_groups`.

    Raises:
        UsageError: not an optimizer; one with masters or ``differentiable=True``; a weight that is in another one.
    """
    _refuse_unfit(optimizer)
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if param.dtype in SIXTEEN_BITS:
            checks.claim(optimizer, param)
    own_step = vars(optimizer).pop("step", None)
    extend(optimizer, WithMasters)
    made: WithMasters = optimizer
    made._attach(own_step)
    for param in made._lowered():
        entry = made.state.get(param)
        if entry:
            made.state[param] = to_fp32(entry)
        made._ensure_master(param)
    return made


def put_masters(optimizer: Any, masters: str, state: str = "fp32", *, separate: bool = True) -> str:
    """Adopt an optimizer, or else put separate FP32 masters under it, if `separate`; the kind that it has now.

    Raises UsageError if it can't be adopted and may not have separate masters, or can't have these either.
    """
    try:
        adopt(optimizer, masters=masters, state=state)
    except UsageError:
        if not separate:
            raise
        with_masters(optimizer)
        return "separate FP32"
    return masters


class WithMasters(Optimizer):
    """The first base class of an optimizer with masters; the second is the optimizer's own class.

    Works with a `GradScaler` as PyTorch's fused optimizers do: gradients are divided by the scale in FP32 as they are
    copied, and a step whose `found_inf` is not 0 changes nothing, at the cost of waiting for the device.
    """

    _step_supports_amp_scaling = True

    def __init_subclass__(cls) -> None:
        kind: Any = cls
        if kind.__bases__[0] is not WithMasters:
            return  # a wrapper's class that only looks like the optimizer's, as Lightning makes

        @functools.wraps(kind.__bases__[-1].step)  # the signature says whether a closure is needed
        def step(self: WithMasters, *args: Any, **kwargs: Any) -> Any:
            return WithMasters.step(self, *args, **kwargs)

        step.hooked = step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # the own step runs the hooks
        kind.step = step

    def _attach(self, own_step: Callable[..., Any] | None = None) -> None:
        self._masters: dict[Tensor, nn.Parameter] = {}
        self._is_swapped = False
        self._is_new = False  # has states of no step, here or where they were saved
        self._own_step = own_step  # set on the object, by a scheduler or a user

    def __reduce_ex__(self, protocol: Any) -> Any:
        return empty, type(self).__bases__, self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        # Masters are separate, because the optimizer's own class may read its entries as it is unpickled.
        masters = {p: entry[MASTER] for p, entry in self.state.items() if MASTER in entry}
        entries = {p: without_master(entry) for p, entry in self.state.items()}
        held = defaultdict(dict, {p: entry for p, entry in entries.items() if entry != {}})
        return {"inner": {**super().__getstate__(), "state": held}, "masters": masters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "masters" not in state:  # called by load_state_dict
            super().__setstate__(state)
            return
        self._attach()
        super().__setstate__(state["inner"])
        for param, master in state["masters"].items():
            checks.claim(self, param)
            self.state[param][MASTER] = master

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Run the optimizer's own step on the masters, then update the weights; returns None if the step is skipped."""
        self._opt_called = True  # read by schedulers
        if not self._has_states() and state_dicts.is_for_checkpoint():
            self._make_states()
            return None
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return None
        arguments: list[Any] = []
        if self._is_new:
            masters = {
                param: {MASTER: entry[MASTER]} for param, entry in self.state.items() if MASTER in entry
            }
            self.state.clear()
            self.state.update(masters)
            self._is_new = False
        if closure is not None:

            def evaluate() -> Any:
                self._end()
                result = closure()
                self._begin(None)
                return result

            arguments.append(evaluate)
        # Hidden from the optimizer's own step, which may be a fused one and divide once more.
        hidden: dict[str, Any] = {
            name: vars(self).pop(name) for name in ("grad_scale", "found_inf") if name in vars(self)
        }
        try:
            self._begin(None if closure else hidden.get("grad_scale"))
            return (self._own_step or super().step)(*arguments, **kwargs)
        finally:
            self.__dict__ |= hidden
            if self._is_swapped:
                self._end()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its 16-bit weights get masters."""
        super().add_param_group(param_group)
        for param in self._lowered():
            self._ensure_master(param)

    def master(self, param: Tensor) -> Tensor:
        """A copy of a parameter's FP32 master, or of an FP32 parameter itself. UsageError if it is in no group."""
        self._check_own(param)
        if param.dtype not in SIXTEEN_BITS:
            return param.detach().clone()
        value = decode_master("fp32", local(param.detach()), local(self._ensure_master(param)))
        return shards.joined(value, param)

    @torch.no_grad()
    def set_master(self, param: Tensor, value: Tensor) -> None:
        """Set a parameter's master and weight from an FP32 value. UsageError for another shape or optimizer."""
        self._check_own(param)
        if value.shape != param.shape:
            raise UsageError(
                f"set_master: the value has shape {list(value.shape)}; use the parameter's, {list(param.shape)}."
            )
        value = shards.placed(value, param)
        if param.dtype in SIXTEEN_BITS:
            master = self._ensure_master(param)
            master.copy_(value)
            write_weights([(master, param)])
        else:
            param.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with each 16-bit weight's FP32 ``"master"`` among its entries.

        Of shards, it has all states also before the first step, because a checkpoint is loaded into them.
        """
        for param in self._lowered():
            self._ensure_master(param)
        if not self._has_states() and (
            any(map(is_spread, parameters(self))) or state_dicts.is_for_checkpoint()
        ):
            self._make_states()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of `state_dict`, or of the optimizer without masters; masters that it lacks stay as they are.

        Load the model's state too, because a weight that differs from its rounded master counts as edited. After a
        UsageError (groups or masters that do not fit) nothing was changed.
        """
        state = dict(state_dict)
        masters = masters_in(state, self.param_groups, self.state)
        entries = {key: without_master(entry) for key, entry in state["state"].items()}
        keys = [key for group in state["param_groups"] for key in group["params"]]
        for param, key in zip(parameters(self), keys):
            if isinstance(entries.get(key), dict):
                entries[key] = {name: shards.placed(value, param) for name, value in entries[key].items()}
        state["state"] = {key: entry for key, entry in entries.items() if entry != {}}
        self._swap_in()
        try:
            super().load_state_dict(state)
        finally:
            self._swap_out()
        self._is_new = state_dicts.have_no_step(self)
        for param, master in masters.items():
            self._ensure_master(param).copy_(shards.placed(master, param))

    def _has_states(self) -> bool:
        return any(entry.keys() - {MASTER} for entry in self.state.values() if isinstance(entry, dict))

    def _make_states(self) -> None:
        """Have the own step create its states, for a checkpoint. The next step starts without them, as if new."""
        if isinstance(self, torch.optim.LBFGS):
            return  # one state for all parameters, and no step without a closure
        try:
            self._begin(None)
            state_dicts.make_states(self, super().step)
        finally:
            if self._is_swapped:
                self._end()
        self._is_new = True

    def _lowered(self) -> list[Tensor]:
        return [param for param in parameters(self) if param.dtype in SIXTEEN_BITS]

    def _check_own(self, param: Tensor) -> None:
        if not any(param is one for one in parameters(self)):
            raise UsageError(f"a parameter of shape {list(param.shape)} is in no group of the optimizer.")

    def _ensure_master(self, param: Tensor) -> Tensor:
        """A weight's master; created if it is missing."""
        entry = self.state.get(param, {})
        master: Tensor | None = entry.get(MASTER)
        if master is None:
            checks.claim(self, param)
            kept = take_master(param)
            master = param.detach().to(torch.float32) if kept is None else kept
        elif master.shape != param.shape:
            raise UsageError(
                f"a weight has shape {list(param.shape)} and its master {list(master.shape)}: `.data` was replaced "
                "by a tensor of another shape. Create a new optimizer for the model."
            )
        entry[MASTER] = master = master.to(param.device)
        self.state[param] = entry
        return master

    @torch.no_grad()
    def _begin(self, scale: Tensor | None) -> None:
        """Put the masters in the groups, updated from edited weights, and give them gradients."""
        checks.refuse_replaced(self)
        # Elements of a weight that were edited since replace those of its master.
        masters = ((local(self._ensure_master(param)), local(param.detach())) for param in self._lowered())
        write(((master, low, master) for master, low in masters), functools.partial(decode_master, "fp32"))
        for param in parameters(self):
            grad = param.grad
            if param.dtype not in SIXTEEN_BITS:
                if self.state.get(param) and (master := self.state[param].pop(MASTER, None)) is not None:
                    give_back(param, master, "fp32")  # the model was brought back to FP32
                if grad is not None and scale is not None:
                    local(grad).div_(scale.to(grad.device))
                continue
            if grad is not None:
                wide = grad.to(torch.float32, copy=scale is not None)
                if scale is not None:
                    local(wide).div_(scale.to(grad.device))
                self._parameter(param).grad = wide
        self._swap_in()

    @torch.no_grad()
    def _end(self) -> None:
        """Put the model's weights back in the groups, rounded from the masters."""
        self._swap_out()
        for master in self._masters.values():
            master.grad = None
        write_weights((self.state[param][MASTER], param) for param in self._lowered())

    def masters(self) -> dict[Any, Any]:
        """The 16-bit weights, each with its FP32 master: the `Parameter` that replaces it during a step."""
        return {param: self._parameter(param) for param in self._lowered()}

    def _parameter(self, param: Tensor) -> nn.Parameter:
        """The `Parameter` that replaces a weight during a step: the same one at each step."""
        tensor = self._ensure_master(param)
        master = self._masters.get(param)
        if master is None or (
            # A new one, because assigning to `.data` does not change a DTensor's local part.
            is_spread(tensor) and local(master.detach()).data_ptr() != local(tensor).data_ptr()
        ):
            master = self._masters[param] = nn.Parameter(tensor)
        elif not is_spread(tensor):
            master.data = tensor
        return master

    def _swap_in(self) -> None:
        replaced = self.masters()
        for param, master in replaced.items():
            master.requires_grad_(param.requires_grad)
            del self.state[param][MASTER]
            if not self.state[param]:
                del self.state[param]  # some optimizers ask whether a parameter has a state
        self._exchange(replaced)
        self._is_swapped = True

    def _swap_out(self) -> None:
        back = {master: param for param, master in self._masters.items()}
        listed = set(parameters(self))
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
        raise UsageError(f"with_masters: received {type(optimizer).__name__}. Pass a torch.optim.Optimizer.")
    if isinstance(optimizer, (WithMasters, FusedOptimizer)):
        raise UsageError(f"with_masters: {type(optimizer).__name__} has masters already. Use it as it is.")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UsageError("with_masters: differentiable=True is not supported. Leave it out.")


def write_weights(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Round each FP32 master into its 16-bit weight."""
    rows = ((low := local(weight.detach()), local(master), low) for master, weight in pairs)
    write(rows, lambda part, low: encode_master("fp32", part, low.dtype)[0])
