"""The base of Mezzo's optimizers: everything that a step needs and no update rule knows of.

A step has two parts. Here, in Python, each parameter is looked at: has it a gradient, and are its weight and its
entries in `optimizer.state` the tensors that they were? Its `Row` describes them to the kernels, and is made again
only if not. Then one call a device does the rest: unscale, decode, update, encode, or nothing on overflow.

What it leaves out: `foreach`, `fused`, `capturable`, `differentiable` and `amsgrad`. There is one implementation
a device, and nothing to choose.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, ParamsT

from mezzo.core.errors import UsageError
from mezzo.core.formats import dtype_name
from mezzo.pytorch.kernels.optimizer_step import Hyper, Row, StateSpec, Stepper, stepper
from mezzo.pytorch.loss_scaler import inverse
from mezzo.pytorch.optim import checks, state_dicts, storage
from mezzo.pytorch.optim.storage import Slot
from mezzo.pytorch.weights.lowering import has_master, take_master

Work = dict[torch.device, list[tuple[Hyper, list[Row]]]]


class FusedOptimizer(Optimizer):
    """An optimizer over FP32, bf16 and fp16 weights, whose step is one kernel a device.

    Honours torch.amp's contract: a `grad_scale` that is set on it divides the gradients, and a `found_inf` that
    isn't 0 skips the step, without a wait for the device. A subclass gives its settings' form for the kernels.

    Args:
        params: parameters, named parameters, or groups; a group may have its own `masters` and `state`.
        defaults: the update rule's settings.
        state: how states are stored: `"fp32"`, `"bf16"`, `"int8"`. The small forms are rounded stochastically.
        masters: where a 16-bit weight's FP32 master is: `"fp32"` (a tensor), `"split"` (a 16-bit remainder with a bf16
            weight: the same numbers as `"fp32"`), `"split8"` (an 8-bit one: a 24-bit master), `"none"`. An FP32 weight
            is its own master.
    """

    _step_supports_amp_scaling = True

    TORCH: ClassVar[type[Optimizer] | None] = None
    """torch's own optimizer of this name, with which states are exchanged."""

    NUMBERS: ClassVar[tuple[str, ...]]
    """The settings that are numbers, finite and not negative."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any], *, state: str, masters: str) -> None:
        self._forget()
        super().__init__(params, {**defaults, "masters": dtype_name(masters), "state": dtype_name(state)})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            state_dicts.rename(group)
        self._forget()

    def _forget(self) -> None:
        self._slots: dict[Tensor, Slot] = {}
        self._places: dict[Tensor, tuple[int, int]] = {}
        self._steppers: dict[tuple[str, bool], Stepper] = {}
        self._overflow: dict[torch.device, Tensor] = {}
        self._alias: weakref.ref[Any] | None = None

    def _check(self, group: dict[str, Any]) -> None:
        """Raise a UsageError where a group's settings make no sense."""
        owner = type(self).__name__
        if "betas" in group:
            checks.betas(owner, group["betas"])
        for name in self.NUMBERS:
            checks.number(owner, name, group[name])

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        """A group's settings at this moment, as the kernels take them."""
        raise NotImplementedError

    @_disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own; what is not said is as in the constructor.

        Raises:
            UsageError: a setting out of range, a parameter that can't be moved. The optimizer stays as it was.
        """
        count = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            self._check(param_group)
            checks.group(type(self).__name__, param_group)
        except BaseException:
            del self.param_groups[count:]
            raise

    @_disable_dynamo
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        multiplier: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> Any:
        """Move every parameter that has a gradient; the others, and their states, stay as they are.

        Args:
            closure: computes the loss and its gradients anew; runs once, before the move.
            multiplier: one FP32 number, by which every gradient is multiplied first.
            found_inf: one FP32 number; where it isn't 0, nothing changes: no weight, no state, no step count.

        Returns:
            What the closure returned.

        Raises:
            UsageError: a sparse gradient, a weight whose master another optimizer holds.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        alias = None if self._alias is None else self._alias()
        if alias is not None:
            alias._opt_called = True  # a scheduler that was made over the adopted optimizer asks for it
        groups = [(index, group["params"]) for index, group in enumerate(self.param_groups)]
        self._move(groups, multiplier, found_inf, partial=False)
        return loss

    @_disable_dynamo
    def step_parameters(
        self, params: Sequence[Tensor], *, multiplier: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        """Move only these of the optimizer's parameters, as `step` would; no hooks.

        Raises:
            UsageError: a parameter of another optimizer; and what `step` raises.
        """
        by_group: dict[int, list[Tensor]] = defaultdict(list)
        for param in params:
            by_group[self._place(param)[0]].append(param)
        self._move(list(by_group.items()), multiplier, found_inf, partial=True)

    def _move(
        self,
        groups: Sequence[tuple[int, Sequence[Tensor]]],
        multiplier: Tensor | None,
        found_inf: Tensor | None,
        *,
        partial: bool,
    ) -> None:
        scale: Any = getattr(self, "grad_scale", None)
        found: Any = getattr(self, "found_inf", None)
        if scale is not None:
            inv_scale = inverse(torch.as_tensor(scale))
            multiplier = inv_scale if multiplier is None else multiplier.to(inv_scale.device) * inv_scale
        if found is not None:
            found = torch.as_tensor(found, dtype=torch.float32)
            found_inf = found if found_inf is None else found + found_inf.to(found.device)
        with torch.no_grad():
            work, weights = self._work(groups)
            try:
                for device, batches in work.items():
                    self._stepper(device, partial)(
                        batches,
                        multiplier=_scalar(multiplier, device),
                        found_inf=_scalar(found_inf, device),
                        overflow=self._overflow_on(device),
                    )
            finally:
                for batches in work.values():
                    for _, rows in batches:
                        for row in rows:
                            row.grad = None
            torch.autograd.graph.increment_version(weights)

    def _work(self, groups: Sequence[tuple[int, Sequence[Tensor]]]) -> tuple[Work, list[Tensor]]:
        """The rows that have a gradient, by device, and their weights. Each call here is made for every parameter."""
        work: Work = {}
        weights: list[Tensor] = []
        slots, state = self._slots, self.state
        try:
            for index, params in groups:
                group = self.param_groups[index]
                hyper = self._hyper(group)
                modes = (group["masters"], group["state"], hyper.states)
                device: torch.device | None = None
                rows: list[Row] = []
                for param in params:
                    grad = param.grad
                    if grad is None:
                        continue
                    slot = slots.get(param)
                    if (
                        slot is None
                        or slot.address != param.data_ptr()
                        or slot.dtype is not param.dtype
                        or slot.modes != modes
                        or slot.entries is not state.get(param)
                        or not all(map(is_, slot.entries.values(), slot.tensors))
                        or (not param.is_contiguous() if slot.contiguous else slot.stride != param.stride())
                    ):
                        slot = self._slot(param, group, hyper.states)
                    row = slot.row
                    if row.grad is not None or slot.empty:
                        continue  # listed twice in its group, for which torch has warned; or without elements
                    dtype = grad.dtype
                    known = dtype is slot.dtype or dtype in checks.GRADIENTS
                    if not known or grad.layout is not torch.strided:
                        checks.gradient(grad, param, type(self).__name__)
                    if not (slot.contiguous and grad.is_contiguous()) and grad.stride() != slot.stride:
                        grad = torch.empty_like(row.weight, dtype=dtype).copy_(grad)
                    row.grad = grad
                    if slot.device is not device:
                        device = slot.device
                        rows = []
                        work.setdefault(device, []).append((hyper, rows))
                    rows.append(row)
                    weights.append(param)
        except BaseException:
            for slot in slots.values():
                slot.row.grad = None
            raise
        return work, weights

    def _slot(self, param: Tensor, group: dict[str, Any], states: tuple[StateSpec, ...]) -> Slot:
        """What is known of a parameter; made anew if it is no longer true."""
        modes = (group["masters"], group["state"], states)
        entries = self.state.get(param)
        old = self._slots.get(param)
        if old is not None and old.is_of(param, entries, modes):
            return old
        checks.weight(
            param, group["masters"], f"{type(self).__name__}: a parameter of shape {list(param.shape)}"
        )
        _, ordinal = self._place(param)
        how = storage.storage(param, group, states)
        if how.keeps_master:
            checks.claim(self, param)
        if not entries:
            entries = storage.fresh(param, how, take_master(param))
            self.state[param] = entries
        elif storage.wrong(entries, param, how) or not storage.is_in_place(entries, param, how):
            entries = storage.adapted(entries, param, how, take_master(param))
            self.state[param] = entries
        slot = Slot.of(param, entries, how, modes, ordinal)
        self._slots[param] = slot
        return slot

    def _place(self, param: Tensor) -> tuple[int, int]:
        """The index of a parameter's group, and its own in the whole optimizer."""
        place = self._places.get(param)
        if place is None or not self._is_at(param, place):
            self._places = {}
            ordinal = 0
            for index, group in enumerate(self.param_groups):
                for each in group["params"]:
                    self._places.setdefault(each, (index, ordinal))
                    ordinal += 1
            place = self._places.get(param)
            for gone in [each for each in self._slots if each not in self._places]:
                del self._slots[gone]
        if place is None:
            raise UsageError(
                f"{type(self).__name__}: a parameter of shape {list(param.shape)} is in none of its groups."
            )
        return place

    def _is_at(self, param: Tensor, place: tuple[int, int]) -> bool:
        # Groups are only ever added to in torch; one that was removed by hand moves those behind it.
        index, ordinal = place
        before = sum(len(group["params"]) for group in self.param_groups[:index])
        if index >= len(self.param_groups):
            return False
        params = self.param_groups[index]["params"]
        return 0 <= ordinal - before < len(params) and params[ordinal - before] is param

    def _set_alias(self, alias: Any) -> None:
        """Note the adopted optimizer, over which a scheduler may have been made."""
        self._alias = weakref.ref(alias)

    def _stepper(self, device: torch.device, partial: bool) -> Stepper:
        # Each keeps tables of the rows that it saw last: single rows of a gradient release have their own.
        key = (device.type, partial)
        if key not in self._steppers:
            self._steppers[key] = stepper(device.type)
        return self._steppers[key]

    def _overflow_on(self, device: torch.device) -> Tensor:
        flag = self._overflow.get(device)
        if flag is None:
            flag = self._overflow[device] = torch.zeros((), dtype=torch.float32, device=device)
        return flag

    @property
    def weight_overflow(self) -> Tensor:
        """0-dim FP32 on the first parameter's device: 1.0 once a 16-bit weight there was written as infinite.

        A master from 0x7F7F8000 (3.39e38) up is an infinite bf16 weight; an fp16 weight is infinite from 65520.
        """
        for group in self.param_groups:
            for param in group["params"]:
                return self._overflow_on(param.device)
        raise UsageError(f"{type(self).__name__} has no parameters.")

    def _held(self, param: Tensor) -> Slot:
        group = self.param_groups[self._place(param)[0]]
        return self._slot(param, group, self._hyper(group).states)

    def master(self, param: Tensor) -> Tensor:
        """A parameter's FP32 master: a new tensor, of its shape.

        What the next step starts from: where a weight was edited, the edited value. A parameter that hasn't moved
        yet gets its state here.

        Raises:
            UsageError: a parameter of another optimizer.
        """
        slot = self._held(param)
        return storage.read_master(param, slot.entries, slot.how)

    def set_master(self, param: Tensor, value: Tensor) -> None:
        """Set a parameter's FP32 master, and its weight to what that is in the weight's format.

        Args:
            param: one of this optimizer's.
            value: of its shape; rounded to nearest where less than FP32 is kept of it.

        Raises:
            UsageError: another shape, a parameter of another optimizer.
        """
        slot = self._held(param)
        if value.shape != param.shape:
            raise UsageError(
                f"set_master: the value has the shape {list(value.shape)}, and the parameter {list(param.shape)}."
            )
        storage.write_master(param, slot.entries, slot.how, value)

    @_disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes, as torch's optimizers give it: tensors that go on living with the steps.

        Masters that `lower_weights` keeps aside are taken over first, so that a checkpoint made before the first
        step has them.
        """
        for group in self.param_groups:
            states = self._hyper(group).states
            for param in group["params"]:
                if param not in self.state and has_master(param):
                    self._slot(param, group, states)
        return super().state_dict()

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of this class with the same modes, or of torch's optimizer of the same name.

        A state of one's own goes on to the bit. One of torch's is rounded to what the modes keep, and FP32 masters
        then come from the model's weights.

        Raises:
            UsageError: a state of another optimizer, of other modes or shapes, or over another number of
                parameters. The optimizer stays as it was.
        """
        state_dicts.load(self, state_dict)

    def torch_state_dict(self) -> dict[str, Any]:
        """The state as torch's own optimizer of this name would save it: states in FP32, without masters.

        Raises:
            UsageError: torch has no optimizer of this name (Lion).
        """
        return state_dicts.to_torch(self)


def _scalar(value: Tensor | None, device: torch.device) -> Tensor | None:
    if value is None:
        return None
    return value.detach().to(device=device, dtype=torch.float32, non_blocking=True).reshape(())
