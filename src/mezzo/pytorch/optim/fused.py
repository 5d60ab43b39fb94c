"""The base class of Mezzo's optimizers: everything that a step needs except the update rule.

A step checks in Python that each parameter's tensors are those of its `Row` (else it makes a new one), then calls one
kernel per device, which unscales, decodes, updates and encodes, or does nothing on overflow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer, ParamsT

from mezzo.core.errors import ArgumentTypeError, UsageError
from mezzo.core.formats import dtype_name
from mezzo.pytorch.distributed import is_spread, local
from mezzo.pytorch.dtypes import FLOATS
from mezzo.pytorch.kernels.not_traced import breaks_graph
from mezzo.pytorch.kernels.optimizer_step import Hyper, Row, StateSpec, Stepper, stepper
from mezzo.pytorch.loss_scaler import inverse
from mezzo.pytorch.optim import checks, state_dicts, storage
from mezzo.pytorch.optim.storage import ParameterState
from mezzo.pytorch.weights.stored_parameters import give_back, has_master, take_master

Work = dict[torch.device, list[tuple[Hyper, list[Row]]]]


class FusedOptimizer(Optimizer):
    """An optimizer over FP32, bf16 and fp16 weights, whose step is one kernel per device.

    Works with torch.amp's `GradScaler`: if the attribute `grad_scale` is set, gradients are divided by it; if
    `found_inf` is set and not 0, the step is skipped, without waiting for the device.

    Parameters may be `DTensor`s: each rank updates its own part, with the bits of the whole parameter where it is cut
    along its first dimension. Create the optimizer after `fully_shard`. There, ``state="int8"`` is for parameters whose
    rows are multiples of 64 elements; others have bf16 states.

    Args:
        params: parameters, named parameters, or groups; a group may set `masters` and `state` for itself.
        defaults: the update rule's settings.
        state: format of the optimizer's states: `"fp32"`, `"bf16"` or `"int8"`. The small ones are rounded
            stochastically.
        masters: how the FP32 master of a 16-bit weight is kept: `"fp32"` (a separate tensor), `"split"` (bf16 weights:
            a 16-bit remainder, same results as `"fp32"`), `"split8"` (an 8-bit remainder: a 24-bit master) or `"none"`.
            An FP32 weight is its own master.
    """

    _step_supports_amp_scaling = True

    TORCH: ClassVar[type[Optimizer]]
    """torch's optimizer of the same name, whose states can be loaded and saved."""

    NUMBERS: ClassVar[tuple[str, ...]]
    """The settings that are finite numbers and not negative."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any], *, state: str, masters: str) -> None:
        self._forget()
        if not isinstance(params, Iterable):
            raise ArgumentTypeError(f"{type(self).__name__}: params={params!r:.60}. Use model.parameters().")
        super().__init__(params, {**defaults, "masters": dtype_name(masters), "state": dtype_name(state)})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            state_dicts.rename(group)
        self._forget()

    def _forget(self) -> None:
        self._states: dict[Tensor, ParameterState] = {}
        self._places: dict[Tensor, tuple[int, int]] = {}
        self._steppers: dict[tuple[str, bool], Stepper] = {}
        self._overflow: dict[torch.device, Tensor] = {}

    def _check(self, group: dict[str, Any]) -> None:
        """Raise a UsageError for settings out of range."""
        owner = type(self).__name__
        if "betas" in group:
            checks.betas(owner, group["betas"])
        for name in self.NUMBERS:
            checks.number(owner, name, group[name])

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        """A group's current settings, as the kernels take them."""
        raise NotImplementedError

    @breaks_graph
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters. After a UsageError (a setting out of range) the optimizer is unchanged."""
        count = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            self._check(param_group)
            checks.group(type(self).__name__, param_group)
        except BaseException:
            del self.param_groups[count:]
            raise

    @breaks_graph
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        multiplier: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes loss and gradients; called once, before the update.
            multiplier: an FP32 scalar by which every gradient is multiplied first.
            found_inf: an FP32 scalar; if it is not 0, no weight, state or step count changes.

        Returns:
            The closure's result.

        Raises:
            UsageError: a sparse gradient, or a weight whose master another optimizer holds.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # read by schedulers
        if not self.state and state_dicts.is_for_checkpoint():
            self._make_states(everything=True)
            return loss
        groups = [(index, group["params"]) for index, group in enumerate(self.param_groups)]
        self._move(groups, multiplier, found_inf, partial=False)
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers need not replace it

    @breaks_graph
    def step_parameters(
        self, params: Sequence[Tensor], *, multiplier: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        """Update only these parameters, as `step` does but without hooks. UsageError if one is in no group."""
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
        if not self._states:
            checks.refuse_replaced(self)
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
        """The rows that have a gradient, by device, and their weights. Calls in the loop cost time per parameter."""
        work: Work = {}
        weights: list[Tensor] = []
        states, state = self._states, self.state
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
                    known = states.get(param)
                    own = param
                    if type(param) is not Parameter and is_spread(param):
                        own, grad = local(param), local(grad)
                    if (
                        known is None
                        or known.address != own.data_ptr()
                        or known.dtype is not own.dtype
                        or known.modes != modes
                        or known.entries is not state.get(param)
                        or not all(map(is_, known.entries.values(), known.tensors))
                        or (not own.is_contiguous() if known.contiguous else known.stride != own.stride())
                    ):
                        known = self._state_of(param, group, hyper.states)
                    row = known.row
                    if row.grad is not None or known.is_still:
                        continue  # listed twice in its group, which torch has warned about; or without elements
                    dtype = grad.dtype
                    is_float = dtype is known.dtype or dtype in FLOATS
                    if not is_float or grad.layout is not torch.strided:
                        checks.gradient(grad, param, type(self).__name__)
                    if not (known.contiguous and grad.is_contiguous()) and grad.stride() != known.stride:
                        grad = torch.empty_like(row.weight, dtype=dtype).copy_(grad)
                    row.grad = grad
                    if known.device is not device:
                        device = known.device
                        rows = []
                        work.setdefault(device, []).append((hyper, rows))
                    rows.append(row)
                    weights.append(param)
        except BaseException:
            for known in states.values():
                known.row.grad = None
            raise
        return work, weights

    def _state_of(
        self, param: Tensor, group: dict[str, Any], states: tuple[StateSpec, ...]
    ) -> ParameterState:
        """What is known of a parameter; its entries are made or converted if they don't fit."""
        modes = (group["masters"], group["state"], states)
        entries = self.state.get(param)
        old = self._states.get(param)
        if old is not None and old.is_of(local(param.detach()), entries, modes):
            return old
        what = f"{type(self).__name__}: a parameter of shape {list(param.shape)}"
        checks.weight(param, group["masters"], what)
        _, ordinal = self._place(param)
        how = storage.storage(param, group, states)
        if how.master_key is not None:
            checks.claim(self, param)
        held = storage.held_masters(entries or {})
        if entries and held != "own" and param.dtype is torch.float32:  # the model was brought back to FP32
            give_back(param, entries[storage.MASTER_ENTRIES[held][0]], held)
        if not entries or not storage.fits(entries, param, how):
            self.state[param] = entries = storage.converted(entries or {}, param, how, take_master(param))
        made = self._states[param] = ParameterState(param, entries, how, modes, ordinal)
        return made

    def _place(self, param: Tensor) -> tuple[int, int]:
        """The index of a parameter's group, and its own in the whole optimizer."""
        place = self._places.get(param)
        if place is None or not self._is_at(param, place):
            self._places = {}
            every = ((index, one) for index, group in enumerate(self.param_groups) for one in group["params"])
            for ordinal, (index, one) in enumerate(every):
                self._places.setdefault(one, (index, ordinal))
            place = self._places.get(param)
            for gone in self._states.keys() - self._places.keys():
                del self._states[gone]
        if place is None:
            raise UsageError(
                f"{type(self).__name__}: a parameter of shape {list(param.shape)} is in none of its groups. Use "
                'optimizer.add_param_group({"params": [param]}).'
            )
        return place

    def _is_at(self, param: Tensor, place: tuple[int, int]) -> bool:
        # torch only adds groups; a user who removes one shifts those behind it.
        index, ordinal = place
        before = sum(len(group["params"]) for group in self.param_groups[:index])
        params = self.param_groups[index]["params"] if index < len(self.param_groups) else []
        return 0 <= ordinal - before < len(params) and params[ordinal - before] is param

    def _stepper(self, device: torch.device, partial: bool) -> Stepper:
        # Each caches tables of the rows that it saw last; the single rows of a gradient release have their own.
        key = (device.type, partial)
        if key not in self._steppers:
            self._steppers[key] = self._new_stepper(device.type)
        return self._steppers[key]

    def _new_stepper(self, device_type: str) -> Stepper:
        return stepper(device_type)

    def _overflow_on(self, device: torch.device) -> Tensor:
        flag = self._overflow.get(device)
        if flag is None:
            flag = self._overflow[device] = torch.zeros((), dtype=torch.float32, device=device)
        return flag

    @property
    def weight_overflow(self) -> Tensor:
        """0-dim FP32 on the first parameter's device: 1.0 after a step wrote an infinite 16-bit weight there (bf16 from
        3.39e38 up, fp16 from 65520 up).
        """
        return self._overflow_on(next(p.device for group in self.param_groups for p in group["params"]))

    def _held(self, param: Tensor) -> ParameterState:
        group = self.param_groups[self._place(param)[0]]
        return self._state_of(param, group, self._hyper(group).states)

    def master(self, param: Tensor) -> Tensor:
        """A copy of a parameter's FP32 master, from which the next step starts; of an edited weight, its new value.
        UsageError if the parameter is in no group.
        """
        known = self._held(param)
        return storage.read_master(param, known.entries, known.how)

    def set_master(self, param: Tensor, value: Tensor) -> None:
        """Set a parameter's FP32 master, and its weight to the rounded value.

        `value` has the parameter's shape. It is rounded to nearest if the master has fewer bits than FP32. UsageError
        for another shape, or a parameter in no group.
        """
        known = self._held(param)
        if value.shape != param.shape:
            raise UsageError(
                f"set_master: the value has shape {list(value.shape)}; use the parameter's, {list(param.shape)}."
            )
        storage.write_master(param, known.entries, known.how, value)

    @breaks_graph
    def state_dict(self) -> dict[str, Any]:
        """The state for `load_state_dict`, in torch's form; its tensors are not copies. It includes the masters that
        `lower_weights` keeps, also before the first step, and all states of shards, which a checkpoint is loaded into.
        """
        self._make_states(everything=state_dicts.is_for_checkpoint())
        return super().state_dict()

    def _make_states(self, *, everything: bool) -> None:
        """Create the entries that are missing: of shards and of weights with a kept master, or of every parameter."""
        for group in self.param_groups:
            states = self._hyper(group).states
            for param in group["params"]:
                is_wanted = param.requires_grad and (everything or is_spread(param))
                if param not in self.state and (is_wanted or has_master(param)):
                    self._state_of(param, group, states)

    @breaks_graph
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class with the same modes, to the bit, or of torch's optimizer of the same name.

        The state of a torch optimizer is rounded to the formats of the modes. It has no masters: these start from the
        model's weights, so call `mezzo.load_master_state_dict` afterwards. After a UsageError (another optimizer, other
        modes, shapes or groups) the optimizer is unchanged.
        """
        state_dicts.load(self, state_dict)

    def torch_state_dict(self) -> dict[str, Any]:
        """The state for torch's optimizer of the same name: FP32 states, no masters."""
        return state_dicts.to_torch(self)


def _scalar(value: Tensor | None, device: torch.device) -> Tensor | None:
    if value is None:
        return None
    return value.detach().to(device=device, dtype=torch.float32, non_blocking=True).reshape(())
