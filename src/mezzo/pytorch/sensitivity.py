"""Sensitivity: by how much rounding one module's arithmetic to a format changes the loss, to first order.

    change = sum over the module's outputs of  gradient * (output in the format - output in FP32)

For a linear layer in a format with scales the output is that by the recipe, and there is one more change::

    update = sum of  gradient of the weight * (that gradient by the recipe - in FP32) * |update| / |gradient|

The first is the error of weights and inputs. The second is that of output gradients and inputs: how much less (or more)
the step's own update lowers the loss, as if it followed the gradient. An error in the input's gradient is not counted.
docs/dev/architecture.md describes the measurement. The training step itself is not changed.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.core.calibration import INNER, RANKED, ranked_format
from mezzo.core.compute import QUANTIZED
from mezzo.core.formats import Format
from mezzo.core.recipes import Recipe, recipe_of
from mezzo.core.records import ModuleRounding, SensitivityRecord
from mezzo.pytorch.autocast.modules import heads_of, last_blocks_of
from mezzo.pytorch.emulation import Rounding, floats, is_finite
from mezzo.pytorch.kernels.quantized_linear import misfit, quantized_linear
from mezzo.pytorch.module_paths import around_calls, unwrapped
from mezzo.pytorch.monitor.observer import Scale, StepObserver
from mezzo.pytorch.monitor.operations import in_one_line
from mezzo.pytorch.monitor.replay import ModuleState, SideEffects, devices_of, nothing_left
from mezzo.pytorch.nested import mapped
from mezzo.pytorch.snapshot import RandomState

STEPS = 4
"""Steps that are measured."""
CALLS = 4
"""Calls of one module in one step that are measured; the others are assumed to be alike."""
# Not measured: they only scale random numbers.
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _sums(gradient: Tensor, error: Tensor, exact: Tensor) -> Tensor:
    """FP64 [2] on the CPU: the sums of ``e = gradient * error``, and of ``e * e``.

    Without elements on which nothing depends and which were not finite before.
    """
    terms = (gradient.float() * error.float()).double()
    if not is_finite(terms):
        terms = terms[torch.isfinite(exact) & (gradient != 0.0)]
    return torch.stack([terms.sum(), terms.square().sum()]).cpu()


def _layer_changes(layer: nn.Linear, x: Tensor, gradient: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Of one call: `_sums` of the output, and of the weight's gradient (before the factor; 0 without `weight.grad`)."""
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    x, leaf, grad = x.detach(), weight.clone().requires_grad_(), layer.weight.grad
    exact = nn.functional.linear(x, weight, bias)
    with torch.enable_grad():
        output = quantized_linear(x, leaf, bias, recipe=recipe)
        (found,) = torch.autograd.grad(output, leaf, gradient.to(output.dtype))
    rows, columns = (one.reshape(-1, one.shape[-1]).float() for one in (gradient, x))
    error = found - rows.t() @ columns
    change = _sums(gradient, output.detach().float() - exact, exact)
    return change, torch.zeros_like(change) if grad is None else _sums(grad, error, error)


class _LayerUpdate:
    """A layer's weight before an update, and the sums of its gradient's error."""

    def __init__(self, weight: Tensor) -> None:
        self._weight, self._before = weight, weight.detach().clone()
        self._size = 0.0 if weight.grad is None else float(weight.grad.float().norm())
        self.sums = torch.zeros(2, dtype=torch.float64, device="cpu")

    def added_to(self, row: ModuleRounding) -> ModuleRounding:
        """After the update: a layer's row with both changes."""
        moved = float((self._weight.detach() - self._before).float().norm())
        factor = moved / self._size if self._size else 0.0
        if not math.isfinite(factor):
            return row
        signed, squares = self.sums.tolist()
        return replace(row, signed=row.signed - factor * signed, squares=row.squares + factor**2 * squares)


@dataclass(eq=False)
class _Call:
    """One call of a module, to be run again; `low`: which input tensors would be in the format."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: ModuleState | RandomState
    low: list[bool] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    inner: set[nn.Module] = field(default_factory=set)
    multiplies: bool = False

    def returned(self, output: Any) -> None:
        """Record the gradients that arrive at its outputs; several at one output are summed."""
        tensors = floats(output)
        self.gradients = [None] * len(tensors)

        def keep(gradient: Tensor | None, place: int) -> None:
            if gradient is not None:
                before, now = self.gradients[place], gradient.detach()
                self.gradients[place] = now.clone() if before is None else before + now

        for place, tensor in enumerate(tensors):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(keep, place=place))


class Sensitivities(StepObserver):
    """A `StepObserver` that measures the sensitivity of a model's modules every `every` updates, `STEPS` times."""

    def __init__(self, formats: Sequence[str | Format] = RANKED, *, every: int = 1) -> None:
        super().__init__()
        self._formats, self._every = [ranked_format(one) for one in formats], max(1, every)
        self._recipes = {one.name: recipe_of(one.name) for one in self._formats if one.name in QUANTIZED}
        self._layers: dict[tuple[str, str], _LayerUpdate] = {}
        self._heads: tuple[str, ...] = ()
        self._model: nn.Module | None = None
        self._paths: dict[nn.Module, str] = {}
        self._outer: _Call | None = None
        self._count = 0
        self._loss = 0.0
        self._updates = self._measured = 0
        self._mode: Rounding | None = None
        self._calls: dict[str, list[_Call]] = defaultdict(list)
        self._counts: dict[str, int] = defaultdict(int)
        self._notes: dict[str, None] = {}

    def call_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the inputs of the step's first call; the others are assumed to be alike."""
        if self._measured >= STEPS or self._updates % self._every:
            return
        module = unwrapped(model)
        if self._model is None:
            self._model = module
            self._paths = {inner: path for path, inner in module.named_modules()}
            self._heads = heads_of(module)
        if module is not self._model:
            name, first = type(module).__name__, type(self._model).__name__
            self._notes.setdefault(
                f"{name} is a second model; only the modules of the first, {first}, are ranked"
            )
            return
        self._count += 1
        if self._outer is None:
            args, kwargs = mapped((args, kwargs), lambda t: t.detach().clone())
            self._outer = _Call("", module, args, kwargs, ModuleState(SideEffects(module, statistics=True)))

    def call_ended(self, model: nn.Module, output: Any) -> None:
        """Record the gradients at that call's outputs."""
        if self._outer is not None and unwrapped(model) is self._model and not self._outer.gradients:
            self._outer.returned(output)

    def backward_begins(self, loss: Tensor, scale: Scale) -> None:
        """Add up the step's losses."""
        if self._outer is not None:
            self._loss += float(loss.detach().sum()) * float(scale)

    def update_begins(self, optimizer: Optimizer, scale: Scale) -> None:
        """Measure, before the weights change."""
        if self._outer is not None and self._is_ours(optimizer):
            self._measure(self._outer)

    def update_ended(self, optimizer: Optimizer, **told: Any) -> None:
        """Count the update."""
        if self._model is None or self._is_ours(optimizer):
            self._updates += 1
        if self._layers and self._records and self._is_ours(optimizer):
            rows = cast(SensitivityRecord, self._records[-1]).rows
            for place, row in enumerate(rows):
                if (row.module, row.format) in self._layers:
                    rows[place] = self._layers[row.module, row.format].added_to(row)
            self._layers.clear()

    def step_dropped(self) -> None:
        """Forget the step."""
        self._outer, self._count, self._loss = None, 0, 0.0
        self._calls.clear()
        self._counts.clear()

    def _is_ours(self, optimizer: Optimizer) -> bool:
        mine = set() if self._model is None else {id(p) for p in self._model.parameters()}
        return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])

    def _measure(self, outer: _Call) -> None:
        rows: dict[tuple[str, str], ModuleRounding] = {}
        with self._noting("the model"):
            self._again(outer)
            for path, calls in self._calls.items():
                times = self._count * self._counts[path] / len(calls)
                for call in calls:
                    with self._noting(path or "the model itself"):
                        for row in self._rows_of(call, times):
                            key = path, row.format
                            if one := rows.get(key):
                                signed, squares = one.signed + row.signed, one.squares + row.squares
                                worst = min(one, row, key=lambda each: (not each.cause, each.near))
                                row = replace(worst, signed=signed, squares=squares)
                            rows[key] = row
        self._measured += 1
        shares = [recipe.last_blocks for recipe in self._recipes.values()]
        wide = last_blocks_of(outer.module, max(shares, default=0.0))
        found = SensitivityRecord(self._updates, self._loss, list(rows.values()), list(self._notes), wide)
        self._records.append(found)
        self.step_dropped()

    @contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        """Whatever a script's own module raises when it is run again becomes a note."""
        try:
            yield
        except Exception as error:
            self._notes.setdefault(f"{name} could not be run again: {in_one_line(error)}")

    def _again(self, outer: _Call) -> None:
        """Run a model's call forward and backward, and keep the calls of its modules."""
        model = outer.module
        with nothing_left(model), torch.enable_grad():
            outer.state.put_back()
            leaves: list[Tensor] = []

            def taken(tensor: Tensor) -> Tensor:
                if not tensor.is_floating_point():
                    return tensor
                leaves.append(tensor.detach().clone().requires_grad_())
                return leaves[-1].clone()  # no leaf: it may be written

            args, kwargs = mapped((outer.args, outer.kwargs), taken)
            self._mode = Rounding(self._formats[0])
            inner = [module for module in self._paths if module is not model]
            try:
                with around_calls(inner, self._before, self._after), self._mode:
                    self._before(model, args, kwargs)
                    output = model.forward(*args, **kwargs)
                    self._after(model, args, output)
            finally:
                self._mode = None
            pairs = zip(floats(output), outer.gradients)
            ends = [(y, g) for y, g in pairs if g is not None and y.requires_grad]
            wanted = [*leaves, *(p for p in model.parameters() if p.requires_grad)]
            if ends and wanted:
                torch.autograd.grad([y for y, _ in ends], wanted, [g for _, g in ends], allow_unused=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mode = self._mode
        if mode is None:  # a checkpoint's recomputation
            return
        if mode.inside:
            mode.inside[-1].inner.add(module)
        tensors = floats((args, kwargs))
        low, versions = [mode.low(t) for t in tensors], [t._version for t in tensors]
        random = RandomState.now(devices_of(module), pythons=False)
        mode.inside.append(_Call(self._paths[module], module, args, kwargs, random, low, versions))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._mode is None:
            return
        call = self._mode.inside.pop()
        if output is None or call not in self._mode.computed or isinstance(module, _DROPOUTS):
            return
        call.multiplies = self._mode.computed[call]
        self._counts[call.path] += 1
        if len(self._calls[call.path]) < CALLS:
            call.returned(output)
            self._calls[call.path].append(call)

    def _rows_of(self, call: _Call, times: float) -> Iterator[ModuleRounding]:
        """A row for each format that the module can run in; none where it can't be measured."""
        name = call.path or "the model itself"
        if [t._version for t in floats((call.args, call.kwargs))] != call.versions:
            self._notes.setdefault(f"{name}: not measured, because its input is overwritten later")
            return
        if all(gradient is None for gradient in call.gradients):
            self._notes.setdefault(f"{name}: not measured, because no gradient reaches its output")
            return
        for form in self._formats:
            if form.name in self._recipes:
                yield from self._layer_rows(call, form.name, times)
                continue
            if form.bits < 16 and not call.multiplies:
                continue
            exact, _ = self._run(call, form, rounds=False)
            rounded, mode = self._run(call, form, rounds=True)
            outputs = zip(call.gradients, exact, rounded)
            changes = [_sums(grad, b.float() - a.float(), a) for grad, a, b in outputs if grad is not None]
            found = torch.stack(changes).sum(0) * times
            cause = "" if mode.masks and is_finite(found) else mode.cause
            if mode.within and not cause:  # reading its result in FP32 costs nothing, and isn't this format
                found, cause = torch.full_like(found, math.inf), f"{INNER}{mode.within}"
            yield _row(call, form.name, found, cause, near=mode.near and cause == mode.cause)

    def _layer_rows(self, call: _Call, format: str, times: float) -> Iterator[ModuleRounding]:
        """A linear layer's row for a format whose factors have scales; none for the head and other modules."""
        layer, recipe, gradient = call.module, self._recipes[format], call.gradients[0]
        if isinstance(layer, nn.MultiheadAttention):
            fix = f"module.{call.path}=bf16 keeps them in bf16"
            self._notes.setdefault(f"{call.path}: its projections are not measured; {fix}")
        if not isinstance(layer, nn.Linear) or call.path in self._heads or gradient is None:
            return
        if why := misfit(recipe, layer.in_features, layer.out_features):
            self._notes.setdefault(f"{call.path}: {why}")
            return
        x = floats((call.args, call.kwargs))[0]
        with nothing_left(layer):
            output, update = _layer_changes(layer, x, gradient, recipe)
        if (call.path, format) not in self._layers:
            self._layers[call.path, format] = _LayerUpdate(layer.weight)
        self._layers[call.path, format].sums += update * times
        yield _row(call, format, output * times)

    @torch.no_grad()
    def _run(self, call: _Call, form: Format, *, rounds: bool) -> tuple[list[Tensor], Rounding]:
        """The floating outputs of a call, and what passed the range; `rounds` its own operations' results too."""
        mode = Rounding(form, rounds=rounds)
        low = iter(call.low)

        def taken(tensor: Tensor) -> Tensor:
            return mode.handed_on(tensor, next(low, False)) if tensor.is_floating_point() else tensor

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            mode.inside.append(module)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            if output is not None and len(mode.inside) == 1:
                path = self._paths[module]
                output = mapped(output, lambda t: mode.handed_on(t, True, path) if mode.low(t) else t)
            mode.inside.pop()
            return output

        with nothing_left(call.module):
            call.state.put_back()
            args, kwargs = mapped((call.args, call.kwargs), taken)
            with around_calls(call.inner, before, after), mode:
                output = call.module.forward(*args, **kwargs)
        return floats(output), mode


def _row(call: _Call, format: str, found: Tensor, cause: str = "", near: bool = False) -> ModuleRounding:
    signed, squares = found.tolist() if is_finite(found) else (math.inf, math.inf)
    return ModuleRounding(call.path, type(call.module).__name__, format, signed, squares, cause, near)
