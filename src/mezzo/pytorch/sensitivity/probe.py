"""Probe: looks at a few FP32 steps and measures, for every module that rounds, what 16 bits would do there.

In a step that is looked at, each module's calls are kept with their inputs, by reference, and with the gradients that
reach their outputs. When backward is through and before the optimizer moves, each is run again in both formats
(`measure`). Training goes on as if nobody had looked: gradients, buffers and random numbers are as they were.

What it leaves out: models after the first that is called (one is tuned), and the inside of
compiled functions (`mezzo tune` runs the script with the compiler off).
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.core.finding import Finding
from mezzo.core.records import Record
from mezzo.core.sensitivity import Rounding, Sensitivities
from mezzo.pytorch.sensitivity.collected import Collected
from mezzo.pytorch.sensitivity.flow import Flow, floats_in
from mezzo.pytorch.sensitivity.kept import KeptCall, cloned
from mezzo.pytorch.sensitivity.measure import LEAST_EXPONENT, Measured, Measurer, NotRepeatableError
from mezzo.pytorch.sensitivity.settings import Settings
from mezzo.pytorch.wrappers import unwrapped

CALLS = 4
"""Calls of one module in one step that are measured; the others are taken to be like them."""
_LARGEST_EXPONENT = 24
_HEADROOM_EXPONENT = 15  # a scaled gradient up to 2^15 leaves a power of two to fp16's largest


class Probe:
    """A `StepObserver` that measures sensitivities and writes them to a file.

    Args:
        path: where `finish` writes them, as JSON; `Settings` lie beside it.
        settings: in place of those.
    """

    def __init__(self, path: Path, settings: Settings | None = None) -> None:
        self._path = Path(path)
        self._settings = Settings.beside(self._path) if settings is None else settings
        self._flow = Flow(self._settings.format)
        self._collected = Collected()
        self._model: nn.Module | None = None
        self._measurer: Measurer | None = None
        self._paths: dict[nn.Module, str] = {}
        self._parameters: set[int] = set()
        self._hooks: list[Any] = []
        self._open: list[KeptCall] = []
        self._calls: dict[str, list[KeptCall]] = defaultdict(list)
        self._counts: dict[str, int] = defaultdict(int)
        self._rewritten: set[str] = set()
        self._updates = 0
        self._measured = 0
        self._loss = 0.0
        self._losses: list[float] = []
        self._exponent = _LARGEST_EXPONENT if self._settings.format == "fp16" else 0
        self._casts: dict[int, float] = {}
        self._notes: dict[str, None] = {}
        self._inside = False

    @property
    def result(self) -> Sensitivities:
        """What was measured so far."""
        units, edges = self._collected.facts(self._flow.ops, self._cast_seconds)
        model = "" if self._model is None else type(self._model).__name__
        device = "" if self._model is None else self._device.type
        region = 0.0 if self._measurer is None else self._measurer.region_seconds()
        return Sensitivities(
            self._settings.format, model, device, self._losses, region, units, edges, list(self._notes)
        )

    def finish(self) -> None:
        """Write what was measured."""
        self.step_dropped()
        self._path.write_text(self.result.to_json(), encoding="utf-8")

    @property
    def _looking(self) -> bool:
        first, steps = self._settings.first, self._settings.steps
        return first <= self._updates and self._measured < steps

    def call_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `StepObserver`."""
        if not self._looking or self._inside:
            return
        module = unwrapped(model)
        if self._model is None:
            self._begin(module)
        if module is not self._model:
            self._notes.setdefault(
                f"{type(module).__name__} is a second model and follows the preset: one is tuned, here "
                f"{type(self._model).__name__}"
            )
            return
        self._inside = True
        self._flow.comes_from_outside([*floats_in(args), *floats_in(kwargs)])
        for each in self._paths:
            if each is not module:
                self._hooks += [
                    each.register_forward_pre_hook(self._before, with_kwargs=True),
                    each.register_forward_hook(self._after, with_kwargs=True, always_call=True),
                ]
        self._before(module, args, kwargs)
        self._flow.__enter__()  # type: ignore[no-untyped-call]

    def call_ended(self, model: nn.Module, output: Any) -> None:
        """See `StepObserver`."""
        if self._inside and unwrapped(model) is self._model:
            self._leave_call()
            self._after(unwrapped(model), (), {}, output)

    def backward_begins(self, loss: Tensor, scale: Tensor | float) -> None:
        """See `StepObserver`."""
        if self._looking and self._calls:
            self._loss += float(loss.detach().sum()) * float(scale)

    def update_begins(self, optimizer: Optimizer, scale: Tensor | float) -> None:
        """See `StepObserver`."""
        if self._calls and self._is_ours(optimizer):
            self._measure()

    def update_ended(
        self,
        optimizer: Optimizer,
        *,
        index: int,
        number: int,
        skipped: Tensor | bool,
        loss_scale: Tensor | float,
    ) -> None:
        """See `StepObserver`."""
        if self._model is None or self._is_ours(optimizer):
            self._updates += 1

    def step_dropped(self) -> None:
        """See `StepObserver`."""
        if self._inside:
            self._leave_call()
        self._forget()

    @property
    def finding(self) -> Finding | None:
        """None: it looks for none."""
        return None

    def drain(self) -> list[Record]:
        """No records: it writes a file of its own."""
        return []

    def _begin(self, model: nn.Module) -> None:
        self._model = model
        self._paths = {module: path for path, module in model.named_modules()}
        self._parameters = {id(p) for p in model.parameters()}
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._measurer = Measurer(self._settings.format, self._device, self._settings.steps)
        if any(
            "_orig_mod" in path or each._compiled_call_impl is not None for each, path in self._paths.items()
        ):
            self._notes.setdefault(
                "parts of the model are compiled: what runs inside them was measured only as far as it ran eagerly"
            )

    def _is_ours(self, optimizer: Optimizer) -> bool:
        return any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"])

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        path = self._paths[module]
        self._flow.enter(path, module)
        if self._open:
            self._open[-1].inner.setdefault(path, module)
        if path in self._rewritten:
            args, kwargs = cloned(args), cloned(kwargs)
        tensors = [*floats_in(args), *floats_in(kwargs)]
        self._open.append(
            KeptCall(
                path,
                module,
                args,
                kwargs,
                [self._flow.would_be_low(t) for t in tensors],
                [self._flow.makers(t) for t in tensors],
                [t._version for t in tensors],
                torch.is_grad_enabled(),
            )
        )

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._flow.leave()
        call = self._open.pop()
        if self._open:
            self._open[-1].inner_low[call.path] = [self._flow.would_be_low(t) for t in floats_in(output)]
        if output is None or call.path not in self._flow.ops:
            return
        self._counts[call.path] += 1
        if len(self._calls[call.path]) < CALLS:
            call.ended(output)
            self._calls[call.path].append(call)

    def _leave_call(self) -> None:
        self._inside = False
        self._flow.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _forget(self) -> None:
        self._flow.forget()
        self._calls.clear()
        self._counts.clear()
        self._open.clear()
        self._loss = 0.0

    def _measure(self) -> None:
        largest = max(
            (call.largest_gradient for calls in self._calls.values() for call in calls), default=0.0
        )
        if self._settings.format == "fp16" and largest > 0.0:
            fits = _HEADROOM_EXPONENT - math.frexp(largest)[1]
            self._exponent = max(LEAST_EXPONENT, min(self._exponent, fits))
        measured: dict[str, list[tuple[KeptCall, Measured]]] = {}
        for path, calls in self._calls.items():
            measured[path] = [(call, found) for call in calls if (found := self._measured_call(call))]
            if measured[path]:
                self._collected.unit(measured[path], self._counts[path])
        sound = [f.exponent for some in measured.values() for _, f in some if not f.overflow]
        self._exponent = min([self._exponent, *sound])
        self._collected.edges(dict(self._flow.taken), measured, self._of_outputs)
        self._losses.append(self._loss)
        self._measured += 1
        self._forget()

    def _measured_call(self, call: KeptCall) -> Measured | None:
        assert self._measurer is not None
        if not call.intact:  # its inputs were written to: the next step keeps copies
            self._rewritten.add(call.path)
            return None
        try:
            return self._measurer.measure(call, self._exponent)
        except NotRepeatableError as error:
            self._collected.unmeasured(call)
            text = (str(error).splitlines() or [""])[0]
            self._notes.setdefault(
                f"{call.path or 'the model'} could not be run again, and is not measured: {text}"
            )
            return None
        except Exception as error:  # whatever a module raises when it is run in 16 bits, or again
            self._collected.failed(call, error)
            return None

    def _of_outputs(self, path: str) -> Rounding:
        assert self._measurer is not None
        return reduce(Rounding.plus, map(self._measurer.rounding, self._calls.get(path, ())), Rounding())

    def _cast_seconds(self, elements: int) -> float:
        if elements not in self._casts:
            assert self._measurer is not None
            self._casts[elements] = self._measurer.cast_seconds(elements)
        return self._casts[elements]
